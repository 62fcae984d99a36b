"""State pools of NumPy and torch callers: rows are read and written on the host, in the caller's own
arrays.

JAX sees the rows that a call names and no more, so a pool is neither copied nor converted. Here
indices have values, so they are checked as :mod:`kdacore.contract.values` says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, StateRows, state_rows
from kdacore.contract.values import check_candidates, check_offsets, check_state_rows
from kdacore.types import ChunkInputs, Outputs, RecurrentInputs, Request
from kdacore_pallas.xla.numerics import required

Array = Any
Inputs = ChunkInputs | RecurrentInputs


class HostCall(NamedTuple):
    """The call to make with JAX in place of a call of a NumPy or torch caller."""

    request: Request
    inputs: Any
    written: Any
    """Rows of the caller's pool that the states returned by the call go to, int64, :data:`ZEROS` for
    none; None when no pool is written."""


def on_host(request: Request, inputs: Inputs) -> HostCall:
    """The call without its pools.

    It starts from ``initial_state [N, ...]``, with ``state_indices`` -1 for sequences without a slot
    and the sequence's number for others. The states to be written come back as its final state: the
    last ones and those at ``checkpoint_offsets``; where every token has a row, as a pool
    ``[N * W, ...]`` with the states after each token.

    Raises:
        ContractError: an index or a count names what is not there, or two name a row that is written.
    """
    if not (request.inplace_state or request.has("state_indices") or request.has("has_initial_state")):
        return HostCall(request, inputs, None)
    values, lengths = _host_values(request, inputs)
    rows = state_rows(request, values, lengths)
    call = HostCall(*_reading(request, inputs, rows), None)
    if not request.inplace_state:
        return call
    if rows.per_token is not None:
        return _with_a_row_for_each_token(call, written_pool(inputs), rows.per_token)
    plain = replace(call.request, inplace_state=False, output_final_state=True)
    if rows.checkpoints is None:
        return HostCall(plain, call.inputs, rows.final)
    written = np.concatenate([rows.final, rows.checkpoints])
    return HostCall(plain, call.inputs._replace(checkpoint_indices=rows.checkpoints), written)


def written_pool(inputs: Inputs) -> Array:
    """The caller's pool that ``inplace_state`` writes."""
    return required(inputs.initial_state if inputs.write_pool is None else inputs.write_pool)


def _host_values(request: Request, inputs: Inputs) -> tuple[dict[str, Any], Any]:
    """The values of the index arrays that were given, checked, and the length of each sequence."""
    given = {name: getattr(inputs, name, None) for name in (*INDEX_VALUES, "cu_seqlens")}
    values = {name: np.asarray(x) for name, x in given.items() if x is not None}
    lengths = np.full(request.N, request.T)
    if request.packed:
        check_offsets(request, "cu_seqlens", values["cu_seqlens"])
        lengths = np.diff(values["cu_seqlens"])
    check_candidates(request, lengths)
    check_state_rows(request, values, lengths)
    return values, lengths


def _reading(request: Request, inputs: Inputs, rows: StateRows) -> tuple[Request, Any]:
    """The call with the states it starts from in place of the pool."""
    request = replace(request, pool_size=0, state_indices_ndim=0, null_index=-1)
    request = replace(request, write_indices_ndim=0, write_pool_size=0)
    changed: dict[str, Any] = {"has_initial_state": None, "write_indices": None, "write_pool": None}
    if inputs.initial_state is not None:
        changed["initial_state"] = _rows_of(inputs.initial_state, rows.read)
    if inputs.state_indices is not None:
        request = replace(request, pool_size=request.N, state_indices_ndim=1)
        changed["state_indices"] = np.where(rows.padding, ZEROS, np.arange(request.N))
    if isinstance(inputs, RecurrentInputs):
        changed["num_accepted_tokens"] = None
    return request, inputs._replace(**changed)


def _with_a_row_for_each_token(call: HostCall, pool: Array, per_token: Any) -> HostCall:
    """The call that writes the state after each token to a row of a new pool."""
    written = per_token.reshape(-1)
    table = np.where(written == ZEROS, ZEROS, np.arange(written.size)).reshape(per_token.shape)
    request = replace(
        call.request, write_pool_size=written.size, write_indices_ndim=2, output_final_state=True
    )
    states = _rows_of(pool, np.full(written.size, ZEROS))
    return HostCall(request, call.inputs._replace(write_indices=table, write_pool=states), written)


def _rows_of(pool: Array, rows: Any) -> Array:
    """``[N, ...]`` copies of rows of a pool, zeros for :data:`ZEROS`."""
    found = pool[np.maximum(rows, 0).tolist()]
    found[np.flatnonzero(rows == ZEROS).tolist()] = 0
    return found


def write_back(request: Request, inputs: Inputs, written: Any, outputs: Outputs) -> Outputs:
    """Write ``out`` and the states of a call into the NumPy or torch caller's arrays.

    Args:
        request: of the caller's call.
        inputs: of the caller's call.
        written: from :class:`HostCall`.
        outputs: of the call made in its place, in the caller's kind.
    """
    o, state = outputs.o, outputs.final_state
    end = int(required(inputs.cu_seqlens)[-1]) if request.packed else request.T
    rows, states = [], None
    if request.inplace_state:
        named = np.flatnonzero(written != ZEROS)
        rows, states = written[named].tolist(), required(state)[named.tolist()]
    # The caller's arrays are written last, with values that are there: what fails before has changed none.
    if inputs.out is not None:
        inputs.out[:, :end] = o[:, :end]
        o = inputs.out
    if request.inplace_state:
        pool = written_pool(inputs)
        pool[rows] = states
        state = pool if request.output_final_state else None
    return outputs._replace(o=o, final_state=state)
