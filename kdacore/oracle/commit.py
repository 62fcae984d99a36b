"""``commit_records`` in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, state_rows
from kdacore.oracle.host_values import F64, to_float64, to_int64
from kdacore.oracle.records import records_of, replayed
from kdacore.oracle.recurrence import initial_states, k_first
from kdacore.types import CommitOutputs, Request


def oracle_commit(request: Request, inputs: Any) -> CommitOutputs:
    """``commit_records``: the whole pool as it should be afterwards, float64."""
    given = {name: getattr(inputs, name, None) for name in INDEX_VALUES}
    values = {name: to_int64(x) for name, x in given.items() if x is not None}
    states = state_rows(request, values, np.zeros(request.N, np.int64))
    S = replayed(request, records_of(inputs), states, initial_states(request, inputs, states.read))
    pool = to_float64(inputs.initial_state)
    named = states.final != ZEROS
    pool[states.final[named]] = k_first(S, request)[named]
    if inputs.conv_state is None:
        return CommitOutputs(pool)
    return CommitOutputs(pool, _committed_conv(inputs, states))


def _committed_conv(inputs: Any, rows: Any) -> F64:
    """The convolution states as ``commit_records`` should leave them."""
    state = to_float64(inputs.conv_state)
    windows = None if inputs.conv_windows is None else to_float64(inputs.conv_windows)
    for n, row in enumerate(rows.conv):
        count = int(rows.preceding[n])
        if row == ZEROS or not count:
            continue
        if windows is None:
            state[row, :, : state.shape[2] - count + 1] = state[row, :, count - 1 :].copy()
        else:
            state[row, :, : windows.shape[2]] = windows[rows.windows[n], count - 1].T
    return state
