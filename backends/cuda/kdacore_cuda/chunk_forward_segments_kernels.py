"""The kernels of ``chunk_kda`` in segments on Hopper, K = V = 128, and the rule for when segments
are used."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from kdacore_cuda.chunk_backward_kernels import prepare_kernel
from kdacore_cuda.kernel_source import KernelSource

_SOURCES = "sm90/chunk_forward/segments"


class SegmentsKernel(NamedTuple):
    """One launch after prepare. All take :data:`kdacore_cuda.kernel_parameters.SEGMENTS`."""

    source: KernelSource
    threads: int
    shared: int
    """Dynamic shared memory in bytes; the source asserts that its layout fits."""


def _kernel(name: str, threads: int, shared: int, **defines: int) -> SegmentsKernel:
    macros = (*defines.items(), ("SHARED_BYTES", shared))
    return SegmentsKernel(KernelSource(f"{_SOURCES}/{name}.cu", name, macros), threads, shared)


@cache
def maps_kernel() -> SegmentsKernel:
    """How each segment maps the state at its start to the state at its end: two blocks per segment
    and value head."""
    return _kernel("maps", 384, 4 * 49 * 1024 + 1024)


@cache
def chain_kernel(blocks: int = 4) -> SegmentsKernel:
    """The state at the start of every segment: ``blocks`` (4 or 8, same bits) per sequence and
    value head."""
    return _kernel("chain", 320, 3 * 64 * 1024 + 128 * 1024 // blocks + 48, ROWS=128 // blocks)


def chain_blocks(items: int, multiprocessors: int) -> int:
    """Blocks per sequence and value head of :func:`chain_kernel`: 8 where each finds a
    multiprocessor of its own."""
    return 8 if 8 * items <= multiprocessors else 4


@cache
def output_kernel(blocks: int = 1) -> SegmentsKernel:
    """Outputs, checkpoints and final states: ``blocks`` (1 or 2, same bits) per segment and value
    head."""
    if blocks == 2:
        return _kernel("output_half", 384, (3 * 65 + 17) * 1024)
    return _kernel("output", 384, (3 * 73 + 8) * 1024)


_PREPARE_CYCLES = 10_000
"""Cycles of one multiprocessor for the operands of 64 tokens of one value head."""
_WALK_CYCLES = {1: 2_100, 2: 1_300}
"""Cycles that 64 tokens take in the output launch, by blocks per state."""
_CYCLES_PER_FUSED_STEP = 2_150
"""Cycles of a step of 32 tokens of the fused kernel, whatever the number of heads."""
WHOLE_SEQUENCES = 1 << 20
"""Chunks of a segment that no sequence is longer than."""
_ITEMS_IN_SEGMENTS = 8
_MAPS_MULTIPROCESSORS = 16
"""Left to maps while prepare runs, which they keep up with."""


def _cycles_per_chunk(items: int, blocks: int, multiprocessors: int) -> float:
    """Cycles for 64 tokens of all ``items`` sequences and value heads, walked from their starts by
    ``blocks`` multiprocessors each while all others prepare."""
    others = multiprocessors - blocks * items
    return max(items * _PREPARE_CYCLES / others, _WALK_CYCLES[blocks]) if others > 0 else float("inf")


def output_blocks(items: int, segments: int, multiprocessors: int) -> int:
    """Blocks per segment and value head of :func:`output_kernel`: 1 or 2.

    Args:
        items: sequences times value heads.
        segments: of all of them.
        multiprocessors: of the device.
    """
    if chunks_per_segment(items) != WHOLE_SEQUENCES:
        return 2 if 2 * segments <= multiprocessors else 1
    return min((1, 2), key=lambda blocks: (_cycles_per_chunk(items, blocks, multiprocessors), -blocks))


def prepare_blocks(items: int, blocks: int, multiprocessors: int) -> int:
    """Multiprocessors that prepare gets; the later launches begin on the others.

    Args:
        items: sequences times value heads.
        blocks: of the output launch for each state.
        multiprocessors: all of them.
    """
    others = blocks * items if chunks_per_segment(items) == WHOLE_SEQUENCES else _MAPS_MULTIPROCESSORS
    return max(1, multiprocessors - others)


def use_segments(items: int, multiprocessors: int) -> bool:
    """Whether ``items`` sequences and value heads are few enough for segments to be faster than the
    fused kernel.

    The fused kernel takes its steps one after another even on an idle device. Both times grow with
    the tokens, and the number of tokens must not decide: appending tokens would then change the
    bits of those before.
    """
    cycles = min(_cycles_per_chunk(items, blocks, multiprocessors) for blocks in (1, 2))
    return cycles <= 2 * _CYCLES_PER_FUSED_STEP


def chunks_per_segment(items: int) -> int:
    """Chunks of 64 tokens in a segment, for ``items`` sequences and value heads.

    More than 8 are walked from their starts: then prepare takes longer than the walk. With fewer
    the walk would, and a sequence is cut. Longer segments leave fewer maps to chain (1300 cycles
    each), shorter ones give more blocks.
    """
    if items > _ITEMS_IN_SEGMENTS:
        return WHOLE_SEQUENCES
    return 16 if items > 6 else 8


def packaged_segments_kernels() -> Iterator[KernelSource]:
    """The segments kernels shipped: all there are."""
    for float_gate, bounded in product((False, True), repeat=2):
        yield prepare_kernel(float_gate, bounded, for_segments=True).source
    for kernel in (maps_kernel(), chain_kernel(4), chain_kernel(8), output_kernel(1), output_kernel(2)):
        yield kernel.source
