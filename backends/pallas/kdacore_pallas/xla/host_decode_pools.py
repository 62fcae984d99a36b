"""Pools of NumPy and torch callers of the recurrent ops, the fused decode ops and ``commit_records``.

As in :mod:`.host_pools` JAX is handed copies of the rows that a call names, and what it returns of them is written
into the caller's arrays. In the call that JAX makes sequence n owns row n of every pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.types import CommitInputs, CommitOutputs, Outputs, Request
from kdacore_pallas.xla.host_pools import checked_rows, rows_of, write_out, write_rows, written_pool
from kdacore_pallas.xla.records import PARTS

Array = Any
_CONV = ("conv_state", "conv_windows")


class HostCall(NamedTuple):
    """The call to make with JAX in place of a call of a NumPy or torch caller."""

    request: Request
    inputs: Any
    rows: StateRows
    """Of the pools in ``inputs``."""
    given: StateRows
    """Of the caller's pools."""


def on_host(request: Request, inputs: Any) -> HostCall:
    """The call on copies of the rows that it names.

    Raises:
        ContractError: an index or a count names what is not there, or two name a row that is written.
    """
    given = checked_rows(request, inputs)
    copies = {name: rows_of(x, rows) for name, x, rows in _pools(inputs, given)}
    written = given.final if given.per_token is None else given.per_token.reshape(-1)
    if inputs.initial_state is not None:
        copies["initial_state"] = rows_of(inputs.initial_state, given.read)
    if request.inplace_state and (given.per_token is not None or request.write_pool_size):
        # States are written to rows of their own, which nothing reads: what these hold does not matter.
        copies["write_pool"] = rows_of(written_pool(inputs), np.full(written.size, ZEROS))
    rows = StateRows(*(_own(field, x) for field, x in given._asdict().items()))
    return HostCall(
        _without_pools(request), inputs._replace(**copies, **_without_indices(inputs)), rows, given
    )


def _without_pools(request: Request) -> Request:
    """The request without what the rows stand for: pools of other sizes run the same program."""
    request = replace(request, pool_size=0, state_indices_ndim=0, null_index=-1)
    return replace(request, write_pool_size=0, write_indices_ndim=0)


def _own(field: str, rows: Any) -> Any:
    """The rows of copies: each sequence, or token, has one of its own."""
    if rows is None or field in ("padding", "replayed", "preceding"):
        return rows
    return np.where(rows == ZEROS, ZEROS, np.arange(rows.size).reshape(rows.shape))


def _without_indices(inputs: Any) -> dict[str, None]:
    """Index arguments, which the rows stand for."""
    names = ("state_indices", "num_accepted_tokens", "has_initial_state", "write_indices", "conv_indices")
    if isinstance(inputs, CommitInputs):
        return {"conv_indices": None}
    return {name: None for name in names if name in inputs._fields}


def _pools(inputs: Any, rows: StateRows) -> list[tuple[str, Array, Any]]:
    """Name, array and rows of the arrays that are written beside the pool, in the order of the op's inputs."""
    conv = zip(_CONV, (rows.conv, rows.windows), strict=True)
    named = [*conv, *[(name, rows.records) for name in PARTS]]
    found = [(name, getattr(inputs, name, None), own) for name, own in named]
    return [(name, x, own) for name, x, own in found if x is not None]


def write_back(inputs: Any, request: Request, given: StateRows, outputs: Outputs) -> Outputs:
    """Write ``out``, states, and what else a call writes into the NumPy or torch caller's arrays.

    Args:
        inputs: of the caller's call.
        request: of the caller's call.
        given: from :class:`HostCall`.
        outputs: of the call made in its place, in the caller's kind.
    """
    # The caller's arrays are written last, with values that are there: what fails before has changed none.
    o, state = write_out(request, inputs, outputs.o), outputs.final_state
    if not request.inplace_state:
        return Outputs(o, state)
    pool = written_pool(inputs)
    write_rows(pool, given.final if given.per_token is None else given.per_token.reshape(-1), state)
    for (name, target, rows), values in zip(_pools(inputs, given), outputs.written, strict=True):
        if name == "conv_windows":
            _write_windows(request, inputs, given, values)
        else:
            write_rows(target, rows, values)
    return Outputs(o, pool if request.output_final_state else None)


def _write_windows(request: Request, inputs: Any, given: StateRows, values: Array) -> None:
    """Write the windows of the candidates, and no others: consecutive windows of a row may share memory."""
    lengths = np.full(request.N, request.T)
    if request.packed:
        lengths = np.diff(np.asarray(inputs.cu_seqlens))
    left = given.windows
    if given.per_token is None:
        left = np.where(given.records == ZEROS, ZEROS, left)
    for t in range(min(values.shape[1], int(lengths.max(initial=0)))):
        write_rows(inputs.conv_windows[:, t], np.where(t < lengths, left, ZEROS), values[:, t])


def write_back_commit(inputs: CommitInputs, given: StateRows, outputs: CommitOutputs) -> CommitOutputs:
    """The same of ``commit_records``."""
    write_rows(inputs.initial_state, given.final, outputs.pool)
    if inputs.conv_state is not None:
        write_rows(inputs.conv_state, given.conv, outputs.conv_state)
    return CommitOutputs(inputs.initial_state, inputs.conv_state)
