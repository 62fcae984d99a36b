"""State pools on the device: which rows a call reads and writes, and a chunked forward around them.

JAX arrays cannot be written, so the updated pool is returned as ``final_state``. It is the only use
of the old one after its rows have been read, so XLA writes a donated pool in its own memory.

Indices may be tracers. What they mean together is written down in
:mod:`kdacore.contract.state_rows`, in NumPy; this is the same on the device. In all arrays of rows
here, -1 stands for no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from kdacore.types import ChunkInputs, Outputs, RecurrentInputs, Request
from kdacore_pallas.xla.numerics import mesh_axes, required, varying
from kdacore_pallas.xla.plan import take_or_zero

Array = Any


class RowsRead(NamedTuple):
    """What the sequences start from."""

    rows: Array
    """``[N]`` int32 rows of ``initial_state``; -1: zeros."""
    no_slot: Array | None
    """``[N]`` bool: padding, whose tokens are not read; None when no sequence can be."""


def slots(request: Request, indices: Array) -> Array:
    """Row numbers as int32, -1 in place of those that name no slot."""
    indices = indices.astype(jnp.int32)
    null = indices < 0
    if request.null_index >= 0:
        null = null | (indices == request.null_index)
    return jnp.where(null, -1, indices)


def rows_read(request: Request, inputs: ChunkInputs | RecurrentInputs) -> RowsRead:
    """The rows that the sequences start from."""
    if inputs.initial_state is None:
        return RowsRead(jnp.full(request.N, -1, jnp.int32), None)
    rows, no_slot = jnp.arange(request.N, dtype=jnp.int32), None
    if inputs.state_indices is not None:
        rows = slots(request, inputs.state_indices)
        no_slot = rows < 0
        if rows.ndim == 2:
            accepted = required(inputs.num_accepted_tokens).astype(jnp.int32)  # type: ignore[union-attr]
            at = jnp.maximum(accepted - 1, 0)[:, None]
            rows = jnp.take_along_axis(rows, at, axis=1)[:, 0]
            no_slot = (rows < 0) & (accepted > 0)
            rows = jnp.where(accepted > 0, rows, -1)
    if getattr(inputs, "has_initial_state", None) is not None:
        rows = jnp.where(inputs.has_initial_state, rows, -1)
    return RowsRead(rows, no_slot)


def rows_written(request: Request, inputs: ChunkInputs | RecurrentInputs, no_slot: Array | None) -> Array:
    """Rows that ``inplace_state`` writes, int32: ``[N]`` by the last states, ``[N, W]`` by the state
    after each token."""
    table = inputs.state_indices if inputs.write_indices is None else inputs.write_indices
    if table is None:
        return jnp.arange(request.N, dtype=jnp.int32)
    table = slots(request, table)
    if no_slot is None:
        return table
    return jnp.where(no_slot[:, None] if table.ndim == 2 else no_slot, -1, table)


def _checkpoint_rows(request: Request, inputs: ChunkInputs, no_slot: Array | None) -> Array:
    """``[C]`` rows of the checkpoints at ``checkpoint_offsets``; none in a sequence without a slot."""
    rows = slots(request, required(inputs.checkpoint_indices))
    if no_slot is None:
        return rows
    owner: Array = 0
    if request.packed:
        ends = required(inputs.cu_seqlens)[1:].astype(jnp.int32)
        offsets = required(inputs.checkpoint_offsets).astype(jnp.int32)
        owner = jnp.minimum(jnp.searchsorted(ends, offsets, side="right"), request.N - 1)
    return jnp.where(no_slot[owner], -1, rows)


def states_read(pool: Array, rows: Array) -> Array:
    """``[N, ...]`` rows of a pool; zeros for -1."""
    return take_or_zero(pool, dropped(rows, pool.shape[0]), 0)


def states_written(pool: Array, rows: Array, states: Array) -> Array:
    """The pool with some rows set; -1: not written."""
    return pool.at[dropped(rows, pool.shape[0])].set(states.astype(pool.dtype), mode="drop")


def dropped(rows: Array, size: int) -> Array:
    """Rows past the end in place of -1: gathers fill zeros there, and scatters are dropped."""
    return jnp.where(rows < 0, size, rows)


def written_pool(inputs: ChunkInputs | RecurrentInputs) -> Array:
    """The pool that ``inplace_state`` writes."""
    return required(inputs.initial_state if inputs.write_pool is None else inputs.write_pool)


# --- a chunked forward around a pool -----------------------------------------------------------------------


class Resolved(NamedTuple):
    """The pool arguments of a chunked call, resolved: what the forward of :func:`without_pool` reads."""

    initial_state: Array | None
    """``[N, ...]`` states that the sequences start from."""
    state_indices: Array | None
    """``[N]``: -1 for sequences without a slot; None when there are none."""
    checkpoint_indices: Array | None
    """``[C]``: -1 for checkpoints that are not written."""
    written: Array | None
    """``[N + C]`` rows of the written pool for the last states and the checkpoints; None without
    ``inplace_state``."""


def uses_pool(request: Request, inputs: ChunkInputs) -> bool:
    """Whether a chunked call has anything for :func:`resolve` to resolve."""
    return request.inplace_state or inputs.state_indices is not None or inputs.has_initial_state is not None


_RESOLVED = (
    "initial_state",
    "cu_seqlens",
    "state_indices",
    "has_initial_state",
    "write_indices",
    "checkpoint_offsets",
    "checkpoint_indices",
)


def pool_arguments(inputs: ChunkInputs) -> ChunkInputs:
    """The inputs that :func:`resolve` reads, and no others."""
    return inputs._replace(**{n: None for n in inputs._fields if n not in _RESOLVED})


def resolve(request: Request, inputs: ChunkInputs) -> Resolved:
    """Read the rows that a call names, and only those."""
    read = rows_read(request, inputs)
    start = None
    if inputs.initial_state is not None:
        start = states_read(inputs.initial_state, read.rows)
    indices = None if read.no_slot is None else jnp.where(read.no_slot, -1, 0)
    if not request.inplace_state:
        return Resolved(start, indices, None, None)
    written = rows_written(request, inputs, read.no_slot)
    if not request.checkpoint_count:
        return Resolved(start, indices, None, written)
    checkpoints = _checkpoint_rows(request, inputs, read.no_slot)
    return Resolved(start, indices, checkpoints, jnp.concatenate([written, checkpoints]))


def without_pool(request: Request) -> Request:
    """The request of a resolved call: states ``[N, ...]`` in, ``[N + C, ...]`` out: the last ones and
    those at ``checkpoint_offsets``."""
    return replace(
        request,
        inplace_state=False,
        output_final_state=request.output_final_state or request.inplace_state,
        pool_size=0,
        state_indices_ndim=0,
        write_indices_ndim=0,
        write_pool_size=0,
        null_index=-1,
    )


def resolved_inputs(inputs: ChunkInputs, resolved: Resolved) -> ChunkInputs:
    """The inputs of a resolved call."""
    return inputs._replace(
        initial_state=resolved.initial_state,
        state_indices=resolved.state_indices,
        has_initial_state=None,
        write_indices=None,
        write_pool=None,
        checkpoint_indices=resolved.checkpoint_indices,
    )


def no_slot(inputs: ChunkInputs) -> Array | None:
    """``[N]`` bool: sequences whose tokens are not read. None when there are none. ``inputs`` are
    resolved."""
    return None if inputs.state_indices is None else inputs.state_indices < 0


def store(pool: Array, rows: Array, states: Array) -> Array:
    """:func:`states_written`, under ``shard_map`` too."""
    axes = mesh_axes(pool, rows, states)
    return states_written(varying(pool, axes), rows, states)


def around(
    forward: Callable[[Request, ChunkInputs], Outputs], request: Request, inputs: ChunkInputs
) -> Outputs:
    """A chunked call over a pool: its rows are gathered, ``forward`` runs, and rows are scattered."""
    resolved = resolve(request, inputs)
    out = forward(without_pool(request), resolved_inputs(inputs, resolved))
    if resolved.written is None:
        return out
    return out._replace(final_state=store(written_pool(inputs), resolved.written, out.final_state))
