"""The stage ``kda_recompute_w_u`` on Hopper, K = V = 128, without q: csrc/sm90/stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kdacore_cuda.build import KernelSource
from kdacore_cuda.prefill_kernels import HOPPER

HEAD_DIM = 128
TEAM = 4
"""Warps that fetch, or compute, a chunk."""


class RingTile(NamedTuple):
    """How a multiprocessor keeps reading while it computes and stores. Both do the same arithmetic, bit for bit."""

    chunks: int
    """Chunks a block holds at once. With 1 there is a block for each chunk, else as many as fit on the device."""
    teams: int
    """Of warps that compute, each a chunk at a time. With more chunks than 1 another one fetches."""
    min_blocks: int
    """Blocks a multiprocessor has room for."""

    @property
    def threads(self) -> int:
        return 32 * TEAM * (self.teams + (self.chunks > 1))

    @property
    def shared(self) -> int:
        """Dynamic shared memory in bytes: ring.cuh has the layout."""
        rows = 64 * (2 * (2 * HEAD_DIM + 16) + 4 * HEAD_DIM + 16)
        inverse, scalars, barriers = 32 * (80 + 144), 4 * 64 + 16, 16
        return self.chunks * (rows + inverse + scalars + barriers)

    def grid(self, items: int, processors: int) -> int:
        """Blocks for ``items`` chunks and value heads."""
        return items if self.chunks == 1 else min(items, self.min_blocks * processors)


RING = RingTile(chunks=3, teams=2, min_blocks=1)
"""Blocks that stay, each with a ring of chunks: the device is evenly full to the end, and a short call ends sooner."""
ONCE = RingTile(chunks=1, teams=1, min_blocks=3)
"""A block a chunk: while one computes, the two beside it read."""
FEW_ITEMS = 16
"""Chunks and value heads a multiprocessor up to which RING is the faster one, as measured."""


def ring_tile(K: int, V: int, with_q: bool, items: int, processors: int, arch: str) -> RingTile | None:
    """What serves a call; None: common/recompute.cu does."""
    if with_q or not K == V == HEAD_DIM or arch != HOPPER:
        return None
    return RING if items <= FEW_ITEMS * processors else ONCE


def ring_kernel(float16: bool, tile: RingTile) -> KernelSource:
    """The kernel; takes :data:`kdacore_cuda.layout.RECOMPUTE`."""
    defines = (
        ("K_DIM", HEAD_DIM),
        ("HALF_F16", int(float16)),
        ("CHUNKS", tile.chunks),
        ("TEAMS", tile.teams),
        ("MIN_BLOCKS", tile.min_blocks),
        ("SHARED_BYTES", tile.shared),
    )
    return KernelSource("sm90/stages/recompute_ring.cu", "recompute_ring", defines)


def packaged_kernels() -> Iterator[KernelSource]:
    """The kernels shipped."""
    for float16, tile in product((False, True), (RING, ONCE)):
        yield ring_kernel(float16, tile)
