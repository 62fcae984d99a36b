"""The plan of a chunked call: tokens to chunks and back.

Tokens are divided into chunks of ``CHUNK`` and segments of ``G`` chunks. A scan runs over the
segments and the work inside a segment is batched, so the memory of intermediates does not grow with
the sequence. A segment's array is ``[M, R, C, D]`` with ``M = G * B * H`` (chunks, batch, q/k
heads) and ``R`` value heads per q/k head. Dense inputs are sliced. Packed inputs are gathered
through a chunk table, which is computed on the device from ``cu_seqlens`` and whose shape depends
on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from kdacore.types import Request

Array = Any
CHUNK = 64


class ChunkTable(NamedTuple):
    """Position of each chunk of a pack. ``M`` chunk slots; slots after the last real chunk have no
    valid row."""

    rows: Array
    """``[M, C]`` int32 token index of each row, ``T`` (which reads as zeros) where there is no token."""
    valid: Array
    """``[M, C]`` bool."""
    seq: Array
    """``[M]`` int32 sequence of the chunk, ``N`` for an unused slot."""
    first: Array
    """``[M]`` bool: first chunk of its sequence (true for unused slots)."""
    last: Array
    """``[M]`` bool: last chunk of its sequence (true for unused slots)."""
    local: Array
    """``[M]`` int32 index of the chunk within its sequence."""
    slot_of_token: Array
    """``[T]`` int32 flat row (chunk * C + row) of each token; ``M * C`` (which reads as zeros) for the
    tokens of no sequence and of sequences without a slot."""


def chunk_table(cu_seqlens: Array, T: int, C: int, slots: int, no_slot: Array | None = None) -> ChunkTable:
    """The table of a pack, computed on the device: ``cu_seqlens`` may be a tracer.

    ``no_slot``: ``[N]`` bool, sequences whose tokens are not read; None when there are none.
    """
    cu = cu_seqlens.astype(jnp.int32)
    N = cu.shape[0] - 1
    lengths = cu[1:] - cu[:-1]
    if no_slot is not None:
        lengths = jnp.where(no_slot, 0, lengths)
    chunks = (lengths + C - 1) // C
    ends = jnp.cumsum(chunks)
    starts = ends - chunks
    slot = jnp.arange(slots, dtype=jnp.int32)
    seq = jnp.searchsorted(ends, slot, side="right").astype(jnp.int32)
    used = seq < N
    at = jnp.minimum(seq, N - 1)
    local = jnp.where(used, slot - starts[at], 0)
    row = cu[at][:, None] + local[:, None] * C + jnp.arange(C, dtype=jnp.int32)
    valid = used[:, None] & (row < cu[at + 1][:, None])
    token = jnp.arange(T, dtype=jnp.int32)
    owner = jnp.searchsorted(cu[1:], token, side="right").astype(jnp.int32)
    read = owner < N
    owner = jnp.minimum(owner, N - 1)
    if no_slot is not None:
        read = read & ~no_slot[owner]
    return ChunkTable(
        rows=jnp.where(valid, row, T),
        valid=valid,
        seq=seq,
        first=~used | (local == 0),
        last=~used | (local == chunks[at] - 1),
        local=local,
        slot_of_token=jnp.where(read, starts[owner] * C + token - cu[owner], slots * C),
    )


def take_or_zero(x: Array, index: Array, axis: int) -> Array:
    """``jnp.take`` that gives zeros where an index is too large."""
    return jnp.take(x, index, axis=axis, mode="fill", fill_value=0)


def slice_start(*at: Array | int) -> tuple[Any, ...]:
    """Start indices of a dynamic slice, all int32: JAX refuses mixed widths, and in x64 mode a
    Python integer has 64 bits."""
    return tuple(np.int32(n) if isinstance(n, int) else n for n in at)


def _same(rows: Array) -> Array:
    return rows


class HeadRange(NamedTuple):
    """A range of the heads of arrays that hold more heads. Slices are read from the arrays; nothing
    is copied first."""

    first: Array
    """First q/k head. An array, so that one program serves every range."""
    total: int
    """Number of q/k heads in the arrays."""


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks and segments of one call. ``table`` is None for dense inputs."""

    B: int
    T: int
    N: int
    H: int
    R: int
    C: int
    G: int
    segments: int
    table: ChunkTable | None
    head_range: HeadRange | None = None
    """Which of the arrays' heads the plan covers; None for all."""
    used_segments: int = 1
    """Number of leading segments that may hold a token."""
    always_masked: bool = False
    apart: bool = False
    """TPUs: results in token order keep heads and channels as two axes, because one would be another layout."""
    no_slot: Array | None = None
    """Dense inputs: ``[B]`` bool, sequences whose tokens are not read; None when there are none."""

    @property
    def slots(self) -> int:
        """Chunk slots, padding included."""
        return self.G * self.segments

    @property
    def M(self) -> int:
        """Leading size of a segment's arrays."""
        return self.G * self.B * self.H

    @property
    def padded(self) -> bool:
        """Dense inputs get tokens appended up to whole segments."""
        return self.table is None and self.slots * self.C != self.T

    @property
    def masked(self) -> bool:
        """Whether a mask marks the rows that are tokens."""
        return self.always_masked or self.padded or self.table is not None or self.no_slot is not None

    def pad(self, x: Array | None) -> Array | None:
        """Dense inputs with zero tokens appended up to whole segments; packed ones as they are."""
        if x is None or not self.padded:
            return x
        width = [(0, 0)] * x.ndim
        width[1] = (0, self.slots * self.C - self.T)
        return jnp.pad(x, width)

    def load(self, x: Array, s: Array, of: Callable[[Array], Array] = _same) -> Array:
        """Segment ``s`` of a padded ``[B, T, heads, ...]`` array, as ``[M, R, C, ...]`` (R = 1 for
        q/k heads).

        ``of`` is applied to the rows in token order; its result is arranged, not the rows.
        """
        return self.arranged(of(self.rows(x, s)))

    def rows(self, x: Array, s: Array) -> Array:
        """Segment ``s`` of a padded array in the order of its tokens, for :meth:`arranged`."""
        group = x.shape[2] // (self.H if self.head_range is None else self.head_range.total)
        first, heads = self.head_slice(group)
        if self.table is None:
            start = slice_start(0, s * (self.G * self.C), first, *(0,) * (x.ndim - 3))
            return lax.dynamic_slice(x, start, (self.B, self.G * self.C, heads, *x.shape[3:]))
        index = lax.dynamic_slice_in_dim(self.table.rows, s * self.G, self.G)
        return lax.dynamic_slice_in_dim(take_or_zero(x[0], index, 0), first, heads, axis=2)

    def arranged(self, rows: Array) -> Array:
        """Values computed from :meth:`rows`, one per row, as ``[M, R, C, ...]``."""
        heads, tail = rows.shape[2], rows.shape[3:]
        if self.table is None:
            rows = jnp.moveaxis(rows.reshape(self.B, self.G, self.C, heads, *tail), 1, 0)
        rows = jnp.moveaxis(rows, -1 - len(tail), -2 - len(tail))
        return rows.reshape(self.M, heads // self.H, self.C, *tail)

    def head_slice(self, group: int) -> tuple[Array | int, int]:
        """First index and number of the plan's heads in an array of ``group`` heads per q/k head."""
        return (0 if self.head_range is None else self.head_range.first * group), self.H * group

    def take_heads(self, x: Array | None, axis: int) -> Array | None:
        """The plan's heads of an array of all q/k or all value heads; None stays None."""
        if x is None or self.head_range is None:
            return x
        return lax.dynamic_slice_in_dim(x, *self.head_slice(x.shape[axis] // self.head_range.total), axis)

    def mask(self, s: Array) -> Array | None:
        """``[M, 1, C, 1]`` bool, true on tokens; None when no mask is used."""
        if not self.masked:
            return None
        if self.table is None:
            row = s * (self.G * self.C) + jnp.arange(self.G * self.C, dtype=jnp.int32)
            valid = (row < self.T).reshape(self.G, self.C)
        else:
            valid = lax.dynamic_slice_in_dim(self.table.valid, s * self.G, self.G)
        if self.no_slot is None:
            valid = jnp.broadcast_to(valid[:, None, :, None], (self.G, self.B * self.H, self.C, 1))
        else:
            read = valid[:, None, None, :] & ~self.no_slot[:, None, None]
            valid = jnp.broadcast_to(read, (self.G, self.B, self.H, self.C))
        return valid.reshape(self.M, 1, self.C, 1)

    def per_chunk(self, x: Array) -> Array:
        """``[M, ...]`` as ``[G, B*H, ...]``, to scan over chunks."""
        return x.reshape(self.G, self.B * self.H, *x.shape[1:])

    def in_order(self, x: Array) -> Array:
        """A segment's ``[M, R, C, ...]`` with heads after rows: ``[G, B, C, heads and channels]``.

        Heads and channels share one axis; otherwise XLA keeps the order of the products and
        transposes everything at the end.
        """
        x = x.reshape(self.G, self.B, self.H * x.shape[1], self.C, -1)
        x = jnp.moveaxis(x, 2, 3)
        return x if self.apart else x.reshape(self.G, self.B, self.C, -1)

    def unload(self, ys: Array, *tail: int) -> Array:
        """Stacked segments of :meth:`in_order`, of any shape, back to ``[B, T, *tail]``."""
        rows = jnp.moveaxis(ys.reshape(self.slots, self.B, -1), 1, 0)
        flat = rows.reshape(self.B, self.slots * self.C, *tail)
        if self.table is None:
            return flat[:, : self.T]
        return take_or_zero(flat, self.table.slot_of_token, 1)


def segment_chunks(request: Request) -> int:
    """Chunks per segment: enough work for the device, few enough that intermediates stay small (or
    in cache).

    It does not depend on T: the program inside a segment is then the same however many tokens
    follow, and so are the bits of its results.
    """
    in_parallel = {"cpu": 8, "cuda": 1024, "rocm": 1024, "tpu": 8}.get(request.device.type, 256)
    return max(1, in_parallel // (request.B * request.HV))


def make_plan(
    request: Request,
    cu_seqlens: Array | None,
    C: int = CHUNK,
    head_range: HeadRange | None = None,
    max_chunks: int | None = None,
    no_slot: Array | None = None,
) -> ChunkPlan:
    """The plan of a call, with at most ``max_chunks`` chunks in a segment, that does not read the
    tokens of the sequences in ``no_slot``, ``[N]`` bool.

    Only the values inside the chunk table depend on more than the request's shapes. With a
    ``head_range`` the request describes a call of those heads alone.
    """
    chunks = request.T // C + request.N if request.packed else -(-request.T // C)
    G = segment_chunks(request)
    G = G if max_chunks is None else min(G, max_chunks)
    used = -(-chunks // G)
    # On a CPU XLA has to see the same program inside every segment, or bits would depend on how
    # many tokens follow: it always masks, and there are always two segments, because XLA unrolls a
    # loop of one.
    cpu = request.device.type == "cpu"
    segments = max(used, 2) if cpu else used
    table = chunk_table(cu_seqlens, request.T, C, G * segments, no_slot) if request.packed else None
    groups = request.HV // request.H
    dense_no_slot = None if request.packed else no_slot
    return ChunkPlan(
        request.B, request.T, request.N, request.H, groups, C, G, segments, table, head_range, used, cpu,
        request.device.type == "tpu", dense_no_slot,
    )  # fmt: skip
