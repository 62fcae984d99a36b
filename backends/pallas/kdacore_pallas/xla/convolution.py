"""The short causal convolution of the fused decode ops, with the pool of its states.

The *line* of a sequence is the window that it reads, ``w - 1`` rows of x, and its tokens behind them. Outputs,
states and windows of candidates are read from it by number.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.types import CommitInputs, DecodeInputs, Request
from kdacore_pallas.xla.numerics import F32, required, unfused
from kdacore_pallas.xla.sequences import Sequences
from kdacore_pallas.xla.state_pool import dropped, states_read

Array = Any
MOST_TOKENS = 16
"""Tokens of a sequence, as the fused decode ops allow."""


class Convolution:
    """The convolution of one call.

    Args:
        request: of the call.
        inputs: its arrays.
        sequences: those without a slot empty.
        rows: of its pools.
    """

    def __init__(self, request: Request, inputs: DecodeInputs, sequences: Sequences, rows: StateRows) -> None:
        self.request, self.inputs, self.sequences, self.rows = request, inputs, sequences, rows
        self.history = required(inputs.conv_weight).shape[1] - 1
        self.most = min(request.T, MOST_TOKENS)
        self.x = inputs.x.reshape(request.B * request.T, -1)
        self.stored = states_read(required(inputs.conv_state), rows.conv)
        """``[N, D, L]``: the rows of the pool."""
        self.window = self._window()

    def _window(self) -> Array:
        """``[N, w - 1, D]``: the tokens before the first one of each sequence, oldest first."""
        rows, preceding = self.rows, self.rows.preceding
        columns = jnp.maximum(preceding - 1, 0)[:, None] + jnp.arange(self.history)
        window = jnp.take_along_axis(self.stored, columns[:, None], axis=2, mode="clip").swapaxes(1, 2)
        if self.inputs.conv_windows is not None:
            kept = _window_before(self.inputs.conv_windows, rows)
            window = jnp.where((preceding > 0)[:, None, None], kept, window)
        unread = (rows.conv == ZEROS) | (rows.read == ZEROS)
        return jnp.where(unread[:, None, None], 0, window)

    def output(self) -> Array:
        """``[B, T, D]`` float32 after the SiLU; of no meaning in rows of no sequence."""
        r, h = self.request, self.history
        weight = required(self.inputs.conv_weight).astype(F32)
        sequence, place, _ = self.sequences.of_tokens(r.B * r.T)
        terms = []
        for tap in range(h + 1):
            back = h - tap
            earlier = jnp.pad(self.x, ((back, 0), (0, 0)))[: self.x.shape[0]]
            in_window = self.window[sequence, jnp.clip(place + tap, 0, h - 1)]
            value = jnp.where((place >= back)[:, None], earlier, in_window)
            terms.append(unfused(value.astype(F32) * weight[:, tap]))
        y: Array = sum(terms[1:], terms[0])
        if self.inputs.conv_bias is not None:
            y = y + self.inputs.conv_bias.astype(F32)
        return unfused(y * jax.nn.sigmoid(y)).reshape(r.B, r.T, -1)

    def _line(self, at: Array) -> Array:
        """``[N, C, D]``: the rows of each sequence's line with the numbers ``at`` ``[N, C]``."""
        h = self.history
        row = jnp.clip(self.sequences.first[:, None] + at - h, 0, self.x.shape[0] - 1)
        before = jnp.take_along_axis(self.window, jnp.clip(at, 0, h - 1)[..., None], axis=1)
        return jnp.where((at < h)[..., None], before, self.x[row])

    def _is_candidate(self) -> Array:
        """``[N]`` bool: sequences that leave a window after each token."""
        rows = self.rows
        if rows.per_token is not None:
            return jnp.ones(self.request.N, bool)
        return jnp.zeros(self.request.N, bool) if rows.records is None else rows.records != ZEROS

    def written(self) -> tuple[Array, ...]:
        """The convolution states, and the windows where there are any, with what the sequences leave."""
        windows = self.inputs.conv_windows
        if windows is None:
            return (self._states(),)
        return self._states(), self._windows(windows)

    def _states(self) -> Array:
        state, h = required(self.inputs.conv_state), self.history
        apart = self.inputs.conv_windows is not None
        if apart and self.rows.per_token is not None:
            return state
        length, candidate = self.sequences.length, self._is_candidate()
        first, count = length, jnp.full_like(length, h)
        if apart:
            first = jnp.where(candidate, 0, length)
        else:
            long = candidate & (length > 0)
            first, count = jnp.where(long, 1, length), jnp.where(long, h + length - 1, h)
        columns = jnp.arange(min(state.shape[2], h + (0 if apart else self.most - 1)), dtype=jnp.int32)
        line = self._line(first[:, None] + columns).swapaxes(1, 2)
        mine = (columns < count[:, None])[:, None]
        values = jnp.where(mine, line, self.stored[..., : len(columns)])
        return state.at[dropped(self.rows.conv, state.shape[0]), :, : len(columns)].set(values, mode="drop")

    def _windows(self, windows: Array) -> Array:
        t = jnp.arange(min(self.most, windows.shape[1]), dtype=jnp.int32)
        taps = jnp.arange(self.history, dtype=jnp.int32)
        line = self._line(jnp.tile((t[:, None] + 1 + taps).reshape(-1), (self.request.N, 1)))
        there = (t < self.sequences.length[:, None]) & self._is_candidate()[:, None]
        row = jnp.where(there, self.rows.windows[:, None], ZEROS)
        values = line.reshape(*there.shape, self.history, -1)
        return windows.at[dropped(row, windows.shape[0]), t].set(values, mode="drop")


def _window_before(windows: Array, rows: StateRows) -> Array:
    """``[N, w - 1, D]``: the windows after the candidates that precede the call."""
    row = dropped(rows.windows, windows.shape[0])
    return windows.at[row, jnp.maximum(rows.preceding - 1, 0)].get(mode="fill", fill_value=0)


def committed(inputs: CommitInputs, rows: StateRows) -> Array:
    """The convolution states after ``commit_records``."""
    state = required(inputs.conv_state)
    count, row = rows.preceding, jnp.where(rows.preceding > 0, rows.conv, ZEROS)
    if inputs.conv_windows is not None:
        values = _window_before(inputs.conv_windows, rows).swapaxes(1, 2)
    else:
        stored, columns = states_read(state, row), jnp.arange(state.shape[2], dtype=jnp.int32)
        source = columns + jnp.maximum(count - 1, 0)[:, None]
        moved = jnp.take_along_axis(stored, jnp.minimum(source, columns[-1])[:, None], axis=2)
        values = jnp.where((source <= columns[-1])[:, None], moved, stored)
    return state.at[dropped(row, state.shape[0]), :, : values.shape[2]].set(values, mode="drop")
