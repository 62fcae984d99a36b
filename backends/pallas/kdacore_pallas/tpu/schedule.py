"""What each step of a chunk kernel works on: a block of rows, the sequence, and which of the rows are its tokens.

Rows stay where they are, ``[B, T, heads * D]``, in blocks of ``C``. Of dense inputs each block has a step. Of a pack
each *visit* has one: a block may hold rows of several sequences and is visited once for each of them, in order, so that
its visits follow one another and its outputs stay in VMEM between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from kdacore_pallas.tpu.plan import ChunkGrid

Array = Any
FIRST, LAST = 1, 2
"""Flags: the first and the last step of a sequence."""
OPENS, CLOSES = 4, 8
"""Flags of a pack: the first and the last visit of a block."""


@dataclass(frozen=True)
class ChunkSchedule:
    """What the kernels read of each step: int32 ``[B * NC]`` each."""

    seq: Array
    """Row of the states."""
    flags: Array
    """``FIRST``, ``LAST``, ``OPENS`` and ``CLOSES``."""
    end: Array
    """Row of the block after the last one that is a token of the sequence."""
    first: Array | None = None
    """First row that is a token of the sequence; no row is where it is not below ``end``. None for dense inputs: 0."""
    block: Array | None = None
    """The block of rows. None for dense inputs: in order."""

    def arrays(self) -> tuple[Array, ...]:
        """The tables in the order of the kernels' arguments;
        :func:`kdacore_pallas.tpu.operands.row_block` takes the last."""
        dense = self.seq, self.flags, self.end
        return dense if self.block is None else (*dense, self.first, self.block)


def chunk_schedule(grid: ChunkGrid, cu_seqlens: Array | None, no_slot: Array | None = None) -> ChunkSchedule:
    """The steps of a call. ``no_slot``: ``[N]`` bool, sequences whose rows are not read; None when there are none."""
    return dense_schedule(grid, no_slot) if cu_seqlens is None else packed_schedule(grid, cu_seqlens, no_slot)


def dense_schedule(grid: ChunkGrid, no_slot: Array | None = None) -> ChunkSchedule:
    """The chunks of dense inputs."""
    c = jnp.tile(jnp.arange(grid.NC, dtype=jnp.int32), grid.B)
    first, last = c == 0, c == grid.NC - 1
    flags = _flag(FIRST, first) + _flag(LAST, last)
    end = jnp.minimum(grid.T - c * grid.C, grid.C)
    if no_slot is not None:
        end = jnp.where(jnp.repeat(no_slot, grid.NC), 0, end)
    return ChunkSchedule(jnp.repeat(jnp.arange(grid.B, dtype=jnp.int32), grid.NC), flags, end)


def packed_schedule(grid: ChunkGrid, cu_seqlens: Array, no_slot: Array | None = None) -> ChunkSchedule:
    """The visits of a pack, computed on the device: ``cu_seqlens`` may be a tracer.

    A sequence has a visit for each block that holds rows of it, and one without rows if it is empty. Then follow the
    blocks after the last sequence, and the last block again until there are ``NC`` visits: these have no rows and, like
    ``seq``, name nothing new.
    """
    cu = jnp.clip(cu_seqlens.astype(jnp.int32), 0, grid.T)
    start, end, last_block = cu[:-1], cu[1:], grid.blocks - 1
    N, C = start.shape[0], grid.C
    opening = jnp.minimum(start // C, last_block)
    closing = jnp.maximum(opening, (end - 1) // C)
    ends = jnp.cumsum(closing - opening + 1, dtype=jnp.int32)
    visit = jnp.arange(grid.NC, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, visit, side="right").astype(jnp.int32)
    seq = jnp.minimum(owner, N - 1)
    after = owner - seq  # 1: after the visits of the last sequence
    block = jnp.minimum(closing[seq] + 1 + visit - ends[seq], last_block)
    rows = jnp.clip(jnp.stack([start[seq], end[seq]]) - block * C, 0, C)
    idle = after == 1
    if no_slot is not None:
        idle = idle | no_slot[seq]
    rows = jnp.where(idle, 0, rows)
    other = block[1:] != block[:-1]
    edge = jnp.ones(1, bool)
    flags = (
        _flag(FIRST, (after == 0) & (block == opening[seq]))
        + _flag(LAST, (after == 0) & (block == closing[seq]))
        + _flag(OPENS, jnp.concatenate([edge, other]))
        + _flag(CLOSES, jnp.concatenate([other, edge]))
    )
    return ChunkSchedule(seq, flags, rows[1], rows[0], block)


def _flag(flag: int, mask: Array) -> Array:
    """The flag where the mask is true. Converted first: strict type promotion does not multiply masks."""
    return flag * mask.astype(jnp.int32)
