"""The short causal convolution of the fused decode ops, with the pool of its states."""

from __future__ import annotations

from typing import Any

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.types import Array, CommitInputs, DecodeInputs, Request
from kdacore_reference.arrays import cast, compute_dtype, device_of, namespace, plain, put
from kdacore_reference.gate import sigmoid
from kdacore_reference.slabs import Sequence


class Convolution:
    """The convolution of one call.

    Args:
        request: of the call.
        inputs: its arrays.
        sequences: those without a slot empty.
        rows: of its pools.
    """

    def __init__(
        self, request: Request, inputs: DecodeInputs, sequences: list[Sequence], rows: StateRows
    ) -> None:
        self.request, self.inputs, self.rows = request, inputs, rows
        self.history = request.spec("conv_weight").shape[1] - 1
        xp = namespace(inputs.x)
        flat = xp.reshape(plain(inputs.x), (request.B * request.T, inputs.x.shape[2]))
        self.lines = [
            (s, xp.concat([self._window(s.n), flat[s.start : s.start + s.length, ...]], axis=0))
            for s in sequences
        ]
        """Of each sequence the window that it reads, ``[w - 1, D]``, and behind it its tokens."""

    def _window(self, n: int) -> Array:
        rows, x = self.rows, self.inputs
        xp, row, preceding = namespace(x.x), int(rows.conv[n]), int(rows.preceding[n])
        if row == ZEROS or rows.read[n] == ZEROS:
            return xp.zeros((self.history, x.x.shape[2]), dtype=plain(x.x).dtype, device=device_of(x.x))
        if x.conv_windows is not None and preceding:
            return plain(x.conv_windows)[int(rows.windows[n]), preceding - 1, ...]
        first = max(preceding - 1, 0)
        return xp.matrix_transpose(plain(x.conv_state)[row, :, first : first + self.history])

    def output(self) -> Array:
        """``[B, T, D]`` after the SiLU, in the dtype of the arithmetic; zero where there is no token."""
        r, x = self.request, self.inputs
        xp = namespace(x.x)
        dtype = compute_dtype(xp, r)
        weight = cast(x.conv_weight, dtype)
        bias = None if x.conv_bias is None else cast(x.conv_bias, dtype)
        found = xp.zeros((r.B * r.T, x.x.shape[2]), dtype=dtype, device=device_of(x.x))
        for s, line in self.lines:
            if not s.length:
                continue
            wide = cast(line, dtype)
            y = wide[: s.length, ...] * weight[:, 0]
            for tap in range(1, self.history + 1):
                y = y + wide[tap : tap + s.length, ...] * weight[:, tap]
            y = y if bias is None else y + bias
            found = put(found, (slice(s.start, s.start + s.length),), y * sigmoid(y))
        return xp.reshape(found, (r.B, r.T, x.x.shape[2]))

    def write(self) -> tuple[Array, ...]:
        """Write the states and windows that the sequences leave. For JAX the new arrays."""
        state, windows = self.inputs.conv_state, self.inputs.conv_windows
        for s, line in self.lines:
            windows = self._leave_windows(windows, s, line)
            columns = self._columns(s, line)
            row = int(self.rows.conv[s.n])
            if columns is not None and row != ZEROS:
                where = (row, slice(None), slice(0, columns.shape[0]))
                state = _stored(state, where, namespace(columns).matrix_transpose(columns))
        if self.request.kind != "jax":
            return ()
        return (state,) if windows is None else (state, windows)

    def _is_candidate(self, n: int) -> bool:
        rows = self.rows
        return rows.per_token is not None or (rows.records is not None and rows.records[n] != ZEROS)

    def _leave_windows(self, windows: Array | None, s: Sequence, line: Array) -> Array | None:
        if windows is None or not self._is_candidate(s.n) or self.rows.windows[s.n] == ZEROS:
            return windows
        for t in range(s.length):
            windows = _stored(
                windows, (int(self.rows.windows[s.n]), t), line[t + 1 : t + 1 + self.history, ...]
            )
        return windows

    def _columns(self, s: Sequence, line: Array) -> Array | None:
        """What goes to the first columns of the sequence's row; None where that stays."""
        if self._is_candidate(s.n):
            if self.inputs.conv_windows is not None:
                return None if self.rows.per_token is not None else line[: self.history, ...]
            if s.length:
                return line[1:, ...]
        return line[line.shape[0] - self.history :, ...]


def _stored(target: Array, where: Any, values: Array) -> Array:
    """As :func:`put`, of an array of the caller's, which is returned itself where it can be written."""
    found = put(plain(target), where, values)
    return found if hasattr(target, "at") and not hasattr(target, "detach") else target


def committed(inputs: CommitInputs, rows: StateRows) -> Array:
    """The convolution states after ``commit_records``: written in place, for JAX a new array."""
    state, windows = inputs.conv_state, inputs.conv_windows
    xp = namespace(state)
    for n in range(len(rows.conv)):
        row, count = int(rows.conv[n]), int(rows.preceding[n])
        if row == ZEROS or not count:
            continue
        if windows is None:
            values = xp.asarray(plain(state)[row, :, count - 1 :], copy=True)
        else:
            values = xp.matrix_transpose(plain(windows)[int(rows.windows[n]), count - 1, ...])
        state = _stored(state, (row, slice(None), slice(0, values.shape[1])), values)
    return state
