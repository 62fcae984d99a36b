"""Plan of a chunked call for the kernels: the grid, padding, and the chunk table.

Dense inputs are not moved, ``[B, T, heads * D]``: a block is one chunk of some heads, and rows
beyond the end are masked. Packed inputs are first gathered so that every sequence starts at a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from kdacore.types import Request
from kdacore_pallas.tpu.sizes import CHUNK
from kdacore_pallas.xla.plan import ChunkTable, chunk_table, take_or_zero

Array = Any
FIRST, LAST = 1, 2


@dataclass(frozen=True)
class ChunkGrid:
    """Sizes of the grid ``(B, head blocks, NC)`` and of its blocks."""

    B: int
    T: int
    """Rows of the arrays the kernel sees."""
    NC: int
    C: int
    H: int
    HV: int
    K: int
    V: int
    hb: int
    """q/k heads per grid step."""
    together: int
    """Value heads of a step that are computed side by side."""
    ragged: bool
    """Whether a chunk may have rows that are not tokens."""

    @property
    def R(self) -> int:
        return self.HV // self.H

    @property
    def hvb(self) -> int:
        """Value heads per grid step."""
        return self.hb * self.R


def chunks(request: Request) -> int:
    return request.T // CHUNK + request.N if request.packed else -(-request.T // CHUNK)


def make_chunk_grid(
    request: Request, hb: int, together: int = 1, rows_without_slot: bool = False
) -> ChunkGrid:
    """The grid of a call. ``rows_without_slot``: the tokens of some sequences may be masked."""
    NC = chunks(request)
    T = NC * CHUNK if request.packed else request.T
    ragged = request.packed or request.T % CHUNK != 0 or rows_without_slot
    H, HV, K, V = request.H, request.HV, request.K, request.V
    return ChunkGrid(request.B, T, NC, CHUNK, H, HV, K, V, hb, together, ragged)


@dataclass(frozen=True)
class ChunkSchedule:
    """What the kernels read of each chunk: int32 ``[B * NC]`` each."""

    seq: Array
    """Row of the states."""
    flags: Array
    """``FIRST``, ``LAST`` or both."""
    valid: Array
    """Number of its rows that are tokens."""

    def arrays(self) -> tuple[Array, Array, Array]:
        return self.seq, self.flags, self.valid


def _flags(first: Array, last: Array) -> Array:
    """Flags from two masks, which are converted first: strict type promotion does not add masks."""
    return FIRST * first.astype(jnp.int32) + LAST * last.astype(jnp.int32)


def dense_schedule(grid: ChunkGrid, no_slot: Array | None = None) -> ChunkSchedule:
    """The chunks of dense inputs. ``no_slot``: ``[B]`` bool, sequences none of whose rows are tokens."""
    c = jnp.tile(jnp.arange(grid.NC, dtype=jnp.int32), grid.B)
    flags = _flags(c == 0, c == grid.NC - 1)
    valid = jnp.minimum(grid.T - c * grid.C, grid.C)
    if no_slot is not None:
        valid = jnp.where(jnp.repeat(no_slot, grid.NC), 0, valid)
    return ChunkSchedule(jnp.repeat(jnp.arange(grid.B, dtype=jnp.int32), grid.NC), flags, valid)


def packed_table(
    request: Request, grid: ChunkGrid, cu_seqlens: Array, no_slot: Array | None = None
) -> ChunkTable:
    return chunk_table(cu_seqlens, request.T, grid.C, grid.NC, no_slot)


def packed_schedule(table: ChunkTable) -> ChunkSchedule:
    return ChunkSchedule(table.seq, _flags(table.first, table.last), jnp.sum(table.valid, 1, dtype=jnp.int32))


def gather(table: ChunkTable | None, x: Array) -> Array:
    """``[1, T, ...]`` with every sequence moved to the start of a chunk; other rows are zero."""
    return x if table is None else take_or_zero(x, table.rows.reshape(-1), 1)


def scatter(table: ChunkTable | None, x: Array) -> Array:
    """The reverse of :func:`gather`; tokens that were not gathered get zeros."""
    return x if table is None else take_or_zero(x, table.slot_of_token, 1)
