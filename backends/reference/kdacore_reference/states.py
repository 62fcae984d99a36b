"""The states a call starts from, and writing those it leaves: one a sequence, or rows of pools."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import numpy as np

from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, StateRows, state_rows
from kdacore.oracle.host_values import to_int64
from kdacore.types import Array, Request
from kdacore_reference.arrays import (
    cast,
    device_of,
    namespace,
    plain,
    put,
    state_layout,
)
from kdacore_reference.slabs import Sequence


def checked_state_rows(request: Request, inputs: Any, sequences: list[Sequence]) -> StateRows:
    """The rows that a call reads and writes.

    Args:
        request: of a chunked or recurrent op.
        inputs: its arrays.
        sequences: all of the call's, in order.

    Raises:
        ContractError: an index, a count or an offset names what is not there, two name a row that
            is written, or a sequence has too many candidates.
    """
    return checked_rows(request, inputs, np.asarray([s.length for s in sequences]))


def checked_rows(request: Request, inputs: Any, lengths: Any) -> StateRows:
    """As :func:`checked_state_rows`, of sequences with these numbers of tokens."""
    given = {name: getattr(inputs, name, None) for name in INDEX_VALUES}
    values = {name: to_int64(x) for name, x in given.items() if x is not None}
    if request.packed:
        values["cu_seqlens"] = np.concatenate([[0], np.cumsum(lengths)])
    if request.inplace_state or request.pool_size or request.read_only_state:
        # Here: a call without a pool does not import it.
        from kdacore.contract.values import check_candidates, check_state_rows

        check_candidates(request, lengths)
        check_state_rows(request, values, lengths)
    return state_rows(request, values, lengths)


def with_slots(sequences: list[Sequence], rows: StateRows) -> list[Sequence]:
    """The same sequences, those without a slot empty: their tokens are not read."""
    return [Sequence(s.n, s.start, 0) if rows.padding[s.n] else s for s in sequences]


def read_states(request: Request, inputs: Any, rows: Several[int], dtype: Any) -> Array:
    """The states to start from, as a new ``[len(rows), HV, K, V]`` of ``dtype``.

    Args:
        request: of a chunked or recurrent op.
        inputs: its arrays.
        rows: of ``initial_state``, the only ones that are read; ``ZEROS`` for a state of zeros.
        dtype: of the result.
    """
    xp = namespace(inputs[0])
    shape = (len(rows), request.HV, request.K, request.V)
    states = xp.zeros(shape, dtype=dtype, device=device_of(inputs[0]))
    given = inputs.initial_state
    if given is None:
        return states
    if list(rows) == list(range(given.shape[0])):
        return put(states, (...,), state_layout(cast(given, dtype), request))
    source = plain(given)
    for i, row in enumerate(rows):
        if row != ZEROS:
            states = put(states, (i,), state_layout(cast(source[int(row), ...], dtype), request))
    return states


def states_of_pool(request: Request, inputs: Any, states: Array) -> Array:
    """``states`` ``[n, HV, K, V]`` in the layout and dtype of the pool that the call writes."""
    return cast(state_layout(states, request), getattr(inputs, request.written_pool).dtype)
