"""The stage ``kda_recompute_w_u`` on Hopper, K = V = 128: csrc/sm90/recompute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kdacore_cuda.build import KernelSource
from kdacore_cuda.prefill_kernels import HOPPER

HEAD_DIM = 128
THREADS = 128


class RecomputeTile(NamedTuple):
    """What a block takes of a chunk and value head. All do the same arithmetic, bit for bit."""

    parts: int
    """1: all channels and values. 2: half of them, so that short calls are spread more evenly; Akk is read twice."""
    min_blocks: int
    """Blocks that a multiprocessor has room for: while some compute, the others read."""

    @property
    def shared(self) -> int:
        """Dynamic shared memory in bytes: csrc/sm90/recompute/memory.cuh has the layout."""
        width = HEAD_DIM // self.parts
        return 64 * (2 * 2 * width + 4 * width + 2 * 64 + 4)

    def grid(self, items: int) -> int:
        """Blocks for ``items`` chunks and value heads; they come in pairs."""
        return (items * self.parts + 1) // 2 * 2


WHOLE = RecomputeTile(parts=1, min_blocks=3)
HALVES = RecomputeTile(parts=2, min_blocks=5)
FEW_ITEMS = 32
"""Chunks and value heads a multiprocessor up to which HALVES is the faster one, as measured."""


def serves(K: int, V: int, arch: str) -> bool:
    """Whether these kernels take such calls; common/recompute.cu takes all others."""
    return K == V == HEAD_DIM and arch == HOPPER


def recompute_tile(items: int, processors: int) -> RecomputeTile:
    """What serves a call of ``items`` chunks and value heads."""
    return HALVES if items <= FEW_ITEMS * processors else WHOLE


def hopper_kernel(float16: bool, with_q: bool, tile: RecomputeTile) -> KernelSource:
    """The kernel; takes :data:`kdacore_cuda.layout.RECOMPUTE`."""
    defines = (
        ("K_DIM", HEAD_DIM),
        ("HALF_F16", int(float16)),
        ("WITH_Q", int(with_q)),
        ("PARTS", tile.parts),
        ("MIN_BLOCKS", tile.min_blocks),
        ("SHARED_LIMIT", tile.shared),
    )
    return KernelSource("sm90/recompute/recompute_hopper.cu", "recompute_hopper", defines)


def packaged_kernels() -> Iterator[KernelSource]:
    """The kernels shipped."""
    for float16, with_q, tile in product((False, True), (False, True), (WHOLE, HALVES)):
        yield hopper_kernel(float16, with_q, tile)
