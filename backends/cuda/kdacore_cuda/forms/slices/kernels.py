"""The kernels for slices of a row that several ranks share (context parallelism) on Hopper,
K = V = 128, and how long their segments are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.forms.backward.kernels import ChunkBackwardKernel, state_threads
from kdacore_cuda.forms.backward.segments_kernels import no_grid
from kdacore_cuda.forms.segments.kernels import (
    MAPS_THREADS,
    SegmentsKernel,
    segments_prepare_kernel,
)
from kdacore_cuda.forms.segments.sizes import CHAIN_THREADS

_FORWARD, _BACKWARD = "sm90/chunk_forward/segments", "sm90/chunk_backward"


@cache
def maps_kernel(leaving_only: bool) -> SegmentsKernel:
    """Forward: :func:`kdacore_cuda.forms.segments.kernels.maps_kernel` from an unknown
    state; two blocks per segment and value head.

    Args:
        leaving_only: of the sequence that goes on behind the slice alone.
    """
    defines = (("WARPGROUPS", 1), ("OF_SLICE", 1), ("LEAVING_ONLY", int(leaving_only)))
    return SegmentsKernel(KernelSource(f"{_FORWARD}/maps.cu", "maps", defines), MAPS_THREADS)


def _compose_source(folder: str, name: str, blocks: int) -> KernelSource:
    """A kernel whose ``blocks`` (4 or 8, same bits) share the rows of a state."""
    return KernelSource(f"{folder}/{name}.cu", name, (("ROWS", 128 // blocks),))


@cache
def transition_kernel(blocks: int) -> SegmentsKernel:
    """Forward: a slice's M and C from the maps of its segments; ``blocks`` per result, value head, and
    M or C. Takes :data:`kdacore_cuda.kernel_parameters.TRANSITION`."""
    return SegmentsKernel(_compose_source(_FORWARD, "transition", blocks), CHAIN_THREADS)


@cache
def starts_kernel(blocks: int) -> SegmentsKernel:
    """Forward: the state at the start of every segment; ``blocks`` per sequence and value head."""
    return SegmentsKernel(_compose_source(_FORWARD, "slice_starts", blocks), CHAIN_THREADS)


@cache
def segment_maps_kernel(warpgroups: int) -> ChunkBackwardKernel:
    """Backward: :func:`kdacore_cuda.forms.backward.segments_kernels.segment_maps_kernel` from an
    unknown gradient."""
    defines = (("WARPGROUPS", warpgroups), ("OF_SLICE", 1))
    source = KernelSource(f"{_BACKWARD}/segment_maps.cu", "segment_maps", defines)
    return ChunkBackwardKernel(source, state_threads(warpgroups), no_grid)


@cache
def slice_gradient_kernel(blocks: int) -> ChunkBackwardKernel:
    """Backward: the gradient of the state at the slice's start, as far as this rank knows it;
    ``blocks`` per result and value head."""
    source = _compose_source(_BACKWARD, "slice_gradient", blocks)
    return ChunkBackwardKernel(source, CHAIN_THREADS, no_grid)


@cache
def chain_kernel(blocks: int) -> ChunkBackwardKernel:
    """Backward: the state at the start of every segment and its gradient at every end; ``blocks`` per
    sequence, value head and direction."""
    return ChunkBackwardKernel(_compose_source(_BACKWARD, "slice_chain", blocks), CHAIN_THREADS, no_grid)


SEGMENT_CHUNKS = (128, 64, 32, 16, 8)


def chunks_per_segment(chunks: int, heads: int, multiprocessors: int) -> int:
    """Chunks of 64 tokens in a segment of a slice: as many as leave every other multiprocessor a segment.

    Long segments leave fewer maps to apply one after another, twice in each pass and 1.2 us each; two
    blocks walk over a segment in most launches. Unlike in a call without ranks, the number of tokens may
    decide: it moves the borders of the slices anyway.

    Args:
        chunks: of the slice.
        heads: batch rows times value heads.
        multiprocessors: of the device.
    """
    fitting = (n for n in SEGMENT_CHUNKS if 2 * -(-chunks // n) * heads >= multiprocessors - 4)
    return next(fitting, SEGMENT_CHUNKS[-1])


def packaged_slices_kernels() -> Iterator[KernelSource]:
    """The kernels shipped: all there are."""
    for leaving_only in (False, True):
        yield maps_kernel(leaving_only).source
    for float_gate, bounded in product((False, True), repeat=2):
        yield segments_prepare_kernel(float_gate, bounded, leaving_only=True).source
    for warpgroups in (1, 2):
        yield segment_maps_kernel(warpgroups).source
    for blocks in (4, 8):
        yield transition_kernel(blocks).source
        yield starts_kernel(blocks).source
        yield slice_gradient_kernel(blocks).source
        yield chain_kernel(blocks).source
