"""The kernels of the chunk backward in segments on Hopper, K = V = 128."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.forms.backward.kernels import ChunkBackwardKernel, state_threads
from kdacore_cuda.forms.segments.sizes import CHAIN_THREADS

_SOURCES = "sm90/chunk_backward"


def no_grid(units: int, heads: int, multiprocessors: int) -> int:
    """For launches whose blocks their caller counts. Raises TypeError."""
    raise TypeError("the grid depends on the number of segments")


def _kernel(name: str, threads: int, **defines: int) -> ChunkBackwardKernel:
    source = KernelSource(f"{_SOURCES}/{name}.cu", name, tuple(defines.items()))
    return ChunkBackwardKernel(source, threads, no_grid)


@cache
def segment_maps_kernel(warpgroups: int) -> ChunkBackwardKernel:
    """How each segment changes the state and its gradient: three walks per segment and value head,
    one block each (``warpgroups`` 2) or two."""
    return _kernel("segment_maps", state_threads(warpgroups), WARPGROUPS=warpgroups)


@cache
def segment_chain_kernel(blocks: int) -> ChunkBackwardKernel:
    """The state at the start of every segment and its gradient at the end of every segment:
    ``blocks`` (4 or 8, same bits) per sequence, value head and direction."""
    return _kernel("segment_chain", CHAIN_THREADS, ROWS=128 // blocks)


@cache
def segment_scan_kernel(warpgroups: int) -> ChunkBackwardKernel:
    """States and their gradients of every segment, from its start and from its end: two walks per
    segment and value head, one block each (``warpgroups`` 2) or two."""
    return _kernel("scan", state_threads(warpgroups), WARPGROUPS=warpgroups, IN_SEGMENTS=1)


def walk_warpgroups(walks: int, multiprocessors: int) -> int:
    """Warpgroups per block, same bits, for so many walks over a segment: 1 where two blocks per
    walk still find a multiprocessor each."""
    return 1 if 2 * walks <= multiprocessors else 2


def chunks_per_segment(items: int) -> int:
    """Chunks of 64 tokens in a segment, for ``items`` sequences and value heads.

    Longer segments leave fewer maps to make and to chain, shorter ones occupy more
    multiprocessors: at 8192 tokens, 4 heads of 16 chunks or 8 of 32 are 32 segments, which are
    walked at once in both directions, by two blocks each.
    """
    return 32 if items > 6 else 16


def packaged_segments_kernels() -> Iterator[KernelSource]:
    """The kernels shipped: all there are."""
    for warpgroups in (1, 2):
        yield segment_maps_kernel(warpgroups).source
        yield segment_scan_kernel(warpgroups).source
    for blocks in (4, 8):
        yield segment_chain_kernel(blocks).source
