"""The fused decode ops in float64: short causal convolution, SiLU, the recurrence, the gated norm of its output."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.contract.state_rows import ZEROS
from kdacore.oracle.gate import sigmoid
from kdacore.oracle.host_values import F64, to_float64
from kdacore.oracle.recurrence import Layout, layout_of, oracle_forward
from kdacore.types import Outputs, RecurrentInputs, Request


def oracle_decode(request: Request, inputs: Any) -> Outputs:
    """``fused_decode_kda`` and ``fused_decode_gated_delta_rule``, exactly.

    Args:
        request: the validated call.
        inputs: :class:`~kdacore.types.DecodeInputs` of any array kind; never written to.

    Returns:
        As :func:`~kdacore.oracle.recurrence.oracle_forward`; ``written`` has the convolution states and the windows
        of candidates, as far as there are any, and the records, as they should be afterwards.
    """
    layout = layout_of(request, inputs)
    conv = None if inputs.conv_weight is None else _Convolution(request, inputs, layout)
    x = to_float64(inputs.x) if conv is None else conv.output
    keys = request.H * request.K
    parts = np.split(x, [keys, 2 * keys], axis=-1)
    q, k, v = (
        part.reshape(request.B, request.T, heads, -1)
        for part, heads in zip(parts, (request.H, request.H, request.HV), strict=True)
    )
    shared = {name: getattr(inputs, name) for name in RecurrentInputs._fields if name in inputs._fields}
    done = oracle_forward(request, RecurrentInputs(q=q, k=k, v=v, **shared))
    o = _normed(request, inputs, done.o, layout)
    written = (*(() if conv is None else conv.written()), *done.written) if request.inplace_state else ()
    return Outputs(o=o, final_state=done.final_state, written=written)


def _normed(request: Request, inputs: Any, o: F64, layout: Layout) -> F64:
    if inputs.norm_weight is None:
        return o
    normed: F64 = (
        o / np.sqrt((o * o).mean(-1, keepdims=True) + request.norm_eps) * to_float64(inputs.norm_weight)
    )
    if inputs.z is not None:
        z = to_float64(inputs.z)
        read = np.zeros(request.B * request.T, bool)
        read[layout.tokens[layout.tokens >= 0]] = True
        z[~read.reshape(request.B, request.T)] = 0.0  # may be anything
        gate = sigmoid(z)
        normed = normed * (gate if request.norm_activation == "sigmoid" else z * gate)
    return normed


class _Convolution:
    """The convolution of a call, and the states and windows that it leaves."""

    def __init__(self, request: Request, inputs: Any, layout: Layout) -> None:
        self.inputs = inputs
        self.state = to_float64(inputs.conv_state)
        self.windows = None if inputs.conv_windows is None else to_float64(inputs.conv_windows)
        weight = to_float64(inputs.conv_weight)
        self.history = weight.shape[1] - 1
        bias = 0.0 if inputs.conv_bias is None else to_float64(inputs.conv_bias)
        x = to_float64(inputs.x).reshape(request.B * request.T, -1)
        output = np.zeros((request.B * request.T, x.shape[1]))
        before = [self._window(layout, n) for n in range(request.N)]
        for n in range(request.N):
            rows = layout.tokens[n][layout.tokens[n] >= 0]
            line = np.concatenate([before[n], x[rows]])
            for t, row in enumerate(rows):
                y = (line[t : t + self.history + 1] * weight.T).sum(0) + bias
                output[row] = y * sigmoid(y)
            self._leave(layout, n, line, len(rows))
        self.output: F64 = output.reshape(request.B, request.T, -1)

    def _window(self, layout: Layout, n: int) -> F64:
        """``[w - 1, D]``: the tokens before the first one of a sequence, oldest first."""
        rows, w = layout.states, self.history
        if rows.conv[n] == ZEROS or rows.read[n] == ZEROS:
            return np.zeros((w, self.state.shape[1]))
        preceding = int(rows.preceding[n])
        if self.windows is not None and preceding:
            return np.array(self.windows[rows.windows[n], preceding - 1])
        first = max(preceding - 1, 0)
        return np.array(self.state[rows.conv[n], :, first : first + w].T)

    def _leave(self, layout: Layout, n: int, line: F64, count: int) -> None:
        """Write what a sequence leaves. ``line``: the window that it read, and its tokens."""
        rows, w = layout.states, self.history
        candidates = rows.per_token is not None or (rows.records is not None and rows.records[n] != ZEROS)
        if candidates and self.windows is not None:
            if rows.windows[n] != ZEROS:
                for t in range(count):
                    self.windows[rows.windows[n], t] = line[t + 1 : t + 1 + w]
            if rows.per_token is not None:
                return  # the pool stays
            columns = line[:w]
        elif candidates and count:
            columns = line[1:]
        else:
            columns = line[len(line) - w :]
        if rows.conv[n] != ZEROS:
            self.state[rows.conv[n], :, : len(columns)] = columns.T

    def written(self) -> tuple[F64, ...]:
        return (self.state,) if self.windows is None else (self.state, self.windows)
