"""The stage ``kda_recompute_w_u`` on Hopper, K = V = 128: how its blocks keep reading while they compute and store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kdacore_cuda.build import KernelSource
from kdacore_cuda.prefill_kernels import HOPPER

HEAD_DIM = 128


class RingTile(NamedTuple):
    """How a block is cut. All do the same arithmetic, bit for bit; csrc/sm90/stages has the source."""

    stages: int
    """Chunks a block holds at once. With 1 there is a block for each chunk, else as many as fit on the device."""
    teams: int
    """Of warps that compute, each a chunk at a time."""
    team: int
    """Warps of one: 4 or 8."""
    producers: int
    """Warps that ask for the next chunks. With one stage those of the team do."""
    bulk: bool
    """By bulk copies of rows, instead of asynchronous copies of 16 bytes."""
    dynamic: bool = False
    """A block takes the next chunk that nobody has taken, instead of every grid-th."""
    together: bool = False
    """A block takes the value heads of a query head one after another."""
    min_blocks: int = 1
    """Blocks a multiprocessor has room for."""

    @property
    def threads(self) -> int:
        return 32 * (self.teams * self.team + (self.producers if self.stages > 1 else 0))

    def shared(self, with_q: bool) -> int:
        """Dynamic shared memory in bytes: ring.cuh has the layout."""
        rows = 64 * ((2 + with_q) * (2 * HEAD_DIM + 16) + 4 * HEAD_DIM + 16)
        inverse, scalars = 32 * (80 + 144), 4 * 64 + 16
        return self.stages * (rows + inverse + scalars + 16) + 32

    def grid(self, items: int, processors: int) -> int:
        """Blocks for ``items`` chunks and value heads."""
        return items if self.stages == 1 else min(items, self.min_blocks * processors)


RING = RingTile(stages=3, teams=1, team=8, producers=4, bulk=False)
"""Without q."""


def ring_tile(K: int, V: int, with_q: bool, arch: str) -> RingTile | None:
    """What serves a call; None: common/recompute.cu does."""
    return RING if K == V == HEAD_DIM and arch == HOPPER and not with_q else None


def ring_kernel(float16: bool, with_q: bool, tile: RingTile) -> KernelSource:
    """The kernel; takes :data:`kdacore_cuda.layout.RECOMPUTE_RING`."""
    defines = (
        ("K_DIM", HEAD_DIM),
        ("HALF_F16", int(float16)),
        ("HAS_Q", int(with_q)),
        ("STAGES", tile.stages),
        ("TEAMS", tile.teams),
        ("TEAM", tile.team),
        ("PRODUCERS", tile.producers),
        ("BULK", int(tile.bulk)),
        ("DYNAMIC", int(tile.dynamic)),
        ("TOGETHER", int(tile.together)),
        ("MIN_BLOCKS", tile.min_blocks),
        ("SHARED_BYTES", tile.shared(with_q)),
    )
    return KernelSource("sm90/stages/recompute_ring.cu", "recompute_ring", defines)


def packaged_kernels() -> Iterator[KernelSource]:
    """The kernels shipped."""
    for float16 in (False, True):
        yield ring_kernel(float16, False, RING)
