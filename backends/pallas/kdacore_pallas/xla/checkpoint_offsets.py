"""States at chosen tokens (``checkpoint_offsets``): the state of the chunk that holds a token, as
the scan over chunks meets it, moved on by the chunk's tokens before that one.

The scan keeps each wanted chunk's start state once, however many checkpoints lie in the chunk. A
second pass, over the checkpoints, applies the rows before each token, all others masked, as a
chunk is applied. Offsets are on the device: shapes depend on their number alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs, Request
from kdacore_pallas.xla import segment
from kdacore_pallas.xla.numerics import dot, required
from kdacore_pallas.xla.plan import ChunkPlan, ChunkTable, segment_chunks

Array = Any


class Places(NamedTuple):
    """Where the checkpoints of a call lie: int32 ``[count]`` each."""

    chunk: Array
    """The chunk that holds the token; the number of chunk slots where no checkpoint is wanted."""
    first: Array
    """The token that this chunk begins with."""
    rows: Array
    """Tokens of the chunk before the checkpoint; 0 where none is wanted."""
    chunks: Array
    """``chunk``, sorted."""


def places(plan: ChunkPlan, inputs: ChunkInputs) -> Places | None:
    """The places of the checkpoints; None without ``checkpoint_offsets``.

    Args:
        plan: of the call, B == 1.
        inputs: resolved (:mod:`.state_pool`): a negative index wants no checkpoint.
    """
    if inputs.checkpoint_offsets is None:
        return None
    offset = jnp.clip(inputs.checkpoint_offsets.astype(jnp.int32), 0, plan.T - 1)
    row = offset if plan.table is None else plan.table.slot_of_token[offset]
    wanted = (required(inputs.checkpoint_indices) >= 0) & (row < plan.slots * plan.C)
    chunk = jnp.where(wanted, row // plan.C, plan.slots)
    rows = jnp.where(wanted, row % plan.C, 0)
    return Places(chunk, offset - rows, rows, jnp.sort(chunk))


def buffer_rows(at: Places, chunks: Array) -> Array:
    """Row of the buffer of start states for each of some chunks: that of the first checkpoint in it,
    or the last row, which is discarded."""
    count = at.chunks.shape[0]
    row = jnp.searchsorted(at.chunks, chunks, side="left").astype(jnp.int32)
    found = at.chunks[jnp.minimum(row, count - 1)] == chunks
    return jnp.where(found, row, count)


def states(
    request: Request,
    arrays: ChunkInputs,
    plan: ChunkPlan,
    at: Places,
    starts: Array,
    precision: lax.Precision,
    axes: frozenset[str],
) -> Array:
    """The states at the checkpoints, ``[count, H, R, K, V]`` float32.

    Args:
        request: of the call.
        arrays: its inputs, padded as ``plan`` says.
        plan: the plan of its chunks.
        at: from :func:`places`.
        starts: ``[count + 1, H, R, K, V]``: start states of the wanted chunks, in the rows of
            :func:`buffer_rows`.
        precision: of the products.
        axes: mesh axes that the results vary over.
    """
    count = at.chunk.shape[0]
    own = _one_chunk_each(request, plan, at)
    params = segment.gate_params(arrays, own)
    start = jnp.take(starts, jnp.searchsorted(at.chunks, at.chunk, side="left"), axis=0)
    unused = own.slots - count
    start = jnp.concatenate([start, jnp.zeros_like(start[:1]).repeat(unused, 0)]) if unused else start
    start = start.reshape(own.slots * own.H, *start.shape[2:])

    def body(carry: tuple[()], s: Array) -> tuple[tuple[()], Array]:
        rows = segment.recurrence_rows(request, segment.load(request, arrays, own, s), params)
        prep = segment.prepare(request, rows, precision)
        before = lax.dynamic_slice_in_dim(start, s * own.M, own.M)
        v_new = prep.u - dot("...ck,...kv->...cv", prep.w, before, precision)
        return carry, segment.next_state(before, v_new, prep.kg, prep.decay.total, precision)

    _, found = segment.scan_segments(request, own, body, (), axes)
    return found.reshape(own.slots, own.H, *found.shape[2:])[:count]


def _one_chunk_each(request: Request, plan: ChunkPlan, at: Places) -> ChunkPlan:
    """A plan with a chunk for each checkpoint, which holds the tokens before it."""
    count = at.chunk.shape[0]
    G = min(count, segment_chunks(request))
    used = -(-count // G)
    segments = max(used, 2) if plan.always_masked else used
    unused = G * segments - count
    first, rows = (jnp.pad(x, (0, unused))[:, None] for x in (at.first, at.rows))
    row = jnp.arange(plan.C, dtype=jnp.int32)
    valid = row < rows
    table = ChunkTable(jnp.where(valid, first + row, plan.T), valid, *[None] * 5)
    return replace(plan, B=1, N=count, G=G, segments=segments, table=table, used_segments=used, no_slot=None)
