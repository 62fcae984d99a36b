"""Records of candidates in float64: ``S = decay * S + outer(key, update)`` for each token."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.oracle.host_values import F64, rounded, to_float64
from kdacore.types import Request


class Records(NamedTuple):
    """The records of a call, ``[R, n, heads, ...]``."""

    update: F64
    key: F64
    decay: F64
    """Trailing axis ``K``, or none with one decay a head."""


def records_of(inputs: Any) -> Records:
    """Copies of the records that a call was given."""
    return Records(*(to_float64(x) for x in (inputs.record_update, inputs.record_key, inputs.record_decay)))


def replayed(request: Request, records: Records, states: StateRows, S: F64) -> F64:
    """The states ``[N, HV, K, V]`` after the records that precede the call, rounded to the pool's dtype; those of
    sequences without records as they were."""
    S = S.copy()
    group = request.HV // request.H
    for n, (row, count) in enumerate(zip(states.records, states.replayed, strict=True)):
        if row == ZEROS:
            continue
        for j in range(count):
            decay = records.decay[row, j].reshape(request.HV, -1)
            key = np.repeat(records.key[row, j], group, axis=0)
            S[n] = decay[..., None] * S[n] + key[..., None] * records.update[row, j][:, None, :]
        S[n] = rounded(S[n], request.state_dtype)
    return S


def keep(
    request: Request,
    records: Records,
    states: StateRows,
    t: int,
    there: Any,
    update: F64,
    key: F64,
    decay: F64,
) -> None:
    """Write what token ``t`` did into ``records``.

    Args:
        request: of the call.
        records: written.
        states: the rows of the call.
        t: the token's number in its sequence.
        there: ``[N]`` bool: sequences that have such a token.
        update: ``[N, HV, V]``; ``key``, ``decay``: ``[N, HV, K]`` (the latter's axis 1 with one decay a head).
    """
    named = there & (states.records != ZEROS)
    rows = states.records[named]
    if not len(rows):  # sequences without records may have more tokens than there are records in a row
        return
    records.update[rows, t] = update[named]
    records.key[rows, t] = key[named][:, :: request.HV // request.H]
    records.decay[rows, t] = decay[named].reshape(len(rows), *records.decay.shape[2:])
