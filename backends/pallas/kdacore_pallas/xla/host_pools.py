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
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_pallas.xla.numerics import required

Array = Any


class HostCall(NamedTuple):
    """The chunked call to make with JAX in place of a call of a NumPy or torch caller."""

    request: Request
    inputs: Any
    written: Any
    """Rows of the caller's pool that the states returned by the call go to, int64, :data:`ZEROS` for
    none; None when no pool is written."""


def on_host(request: Request, inputs: ChunkInputs) -> HostCall:
    """The chunked call without its pools.

    It starts from ``initial_state [N, ...]``, with ``state_indices`` -1 for sequences without a slot
    and the sequence's number for others. The states to be written come back as its final state: the
    last ones and those at ``checkpoint_offsets``.

    Raises:
        ContractError: an index or a count names what is not there, or two name a row that is written.
    """
    if not (request.inplace_state or request.has("state_indices") or request.has("has_initial_state")):
        return HostCall(request, inputs, None)
    rows = checked_rows(request, inputs)
    call = HostCall(*_reading(request, inputs, rows), None)
    if not request.inplace_state:
        return call
    plain = replace(call.request, inplace_state=False, output_final_state=True)
    if rows.checkpoints is None:
        return HostCall(plain, call.inputs, rows.final)
    written = np.concatenate([rows.final, rows.checkpoints])
    return HostCall(plain, call.inputs._replace(checkpoint_indices=rows.checkpoints), written)


def written_pool(inputs: Any) -> Array:
    """The caller's pool that ``inplace_state`` writes."""
    given = getattr(inputs, "write_pool", None)
    return required(inputs.initial_state if given is None else given)


def checked_rows(request: Request, inputs: Any) -> StateRows:
    """The rows that a call reads and writes.

    Raises:
        ContractError: as :func:`on_host`.
    """
    given = {name: getattr(inputs, name, None) for name in (*INDEX_VALUES, "cu_seqlens")}
    values = {name: np.asarray(x) for name, x in given.items() if x is not None}
    lengths = np.full(request.N, request.T)
    if request.op == "commit_records":
        lengths = np.zeros(request.N, np.int64)
    elif request.packed:
        check_offsets(request, "cu_seqlens", values["cu_seqlens"])
        lengths = np.diff(values["cu_seqlens"])
    check_candidates(request, lengths)
    check_state_rows(request, values, lengths)
    return state_rows(request, values, lengths)


def _reading(request: Request, inputs: ChunkInputs, rows: StateRows) -> tuple[Request, Any]:
    """The call with the states it starts from in place of the pool."""
    request = replace(request, pool_size=0, state_indices_ndim=0, null_index=-1)
    request = replace(request, write_indices_ndim=0, write_pool_size=0)
    changed: dict[str, Any] = {"has_initial_state": None, "write_indices": None, "write_pool": None}
    if inputs.initial_state is not None:
        changed["initial_state"] = rows_of(inputs.initial_state, rows.read)
    if inputs.state_indices is not None:
        request = replace(request, pool_size=request.N, state_indices_ndim=1)
        changed["state_indices"] = np.where(rows.padding, ZEROS, np.arange(request.N))
    return request, inputs._replace(**changed)


def rows_of(pool: Array, rows: Any) -> Array:
    """``[N, ...]`` copies of rows of a pool, zeros for :data:`ZEROS`."""
    found = pool[np.maximum(rows, 0).tolist()]
    found[np.flatnonzero(rows == ZEROS).tolist()] = 0
    return found


def write_rows(pool: Array, rows: Any, values: Array) -> None:
    """Write ``values[i]`` to row ``rows[i]`` of a caller's pool; nothing for :data:`ZEROS`."""
    named = np.flatnonzero(rows != ZEROS)
    pool[rows[named].tolist()] = values[named.tolist()]


def write_out(request: Request, inputs: Any, o: Array) -> Array:
    """``o``, or the caller's ``out`` with the rows of its sequences written."""
    if inputs.out is None:
        return o
    end = int(required(inputs.cu_seqlens)[-1]) if request.packed else request.T
    inputs.out[:, :end] = o[:, :end]
    return inputs.out


def write_back(request: Request, inputs: ChunkInputs, written: Any, outputs: Outputs) -> Outputs:
    """Write ``out`` and the states of a call into the NumPy or torch caller's arrays.

    Args:
        request: of the caller's call.
        inputs: of the caller's call.
        written: from :class:`HostCall`.
        outputs: of the call made in its place, in the caller's kind.
    """
    # The caller's arrays are written last, with values that are there: what fails before has changed none.
    o, state = write_out(request, inputs, outputs.o), outputs.final_state
    if request.inplace_state:
        pool = written_pool(inputs)
        write_rows(pool, written, required(state))
        state = pool if request.output_final_state else None
    return outputs._replace(o=o, final_state=state)
