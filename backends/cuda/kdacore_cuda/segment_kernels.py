"""The kernels that scan few heads in segments on Hopper, K = V = 128, and when that pays."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from kdacore_cuda.backward_kernels import prepare_kernel
from kdacore_cuda.build import KernelSource

_SOURCES = "sm90/chunk_forward/segments"


class SegmentKernel(NamedTuple):
    """One launch after prepare. All take :data:`kdacore_cuda.layout.SEGMENTS`."""

    source: KernelSource
    threads: int
    shared: int
    """Dynamic shared memory in bytes; the source asserts that its layout fits."""


def _kernel(name: str, threads: int, shared: int, **defines: int) -> SegmentKernel:
    macros = (*defines.items(), ("SHARED_BYTES", shared))
    return SegmentKernel(KernelSource(f"{_SOURCES}/{name}.cu", name, macros), threads, shared)


@cache
def maps_kernel() -> SegmentKernel:
    """How each segment changes the state: two blocks a segment and value head."""
    return _kernel("maps", 384, 4 * 49 * 1024 + 64, WARPGROUPS=2)


@cache
def chain_kernel(blocks: int = 4) -> SegmentKernel:
    """The state at every segment's start: ``blocks`` blocks, 4 or 8, a sequence and value head, with the same bits."""
    return _kernel("chain", 256, 3 * 64 * 1024 + 128 * 1024 // blocks + 24, ROWS=128 // blocks)


def chain_blocks(items: int, processors: int) -> int:
    """8 where each finds a multiprocessor of its own."""
    return 8 if 8 * items <= processors else 4


@cache
def output_kernel(parts: int = 1) -> SegmentKernel:
    """Outputs, checkpoints and final states: ``parts`` blocks, 1 or 2, a segment and value head, with the same bits."""
    return _kernel("output", 384 if parts == 1 else 160, 3 * 73 * 1024 + 48, WARPGROUPS=2 // parts)


def output_parts(blocks: int, processors: int) -> int:
    """2 where a block for each half of every state still finds a multiprocessor of its own."""
    return 2 if 2 * blocks <= processors else 1


_UNIT, _STEP = 21_000, 2_150
"""Cycles: of one multiprocessor for 64 tokens of one value head in segments, all launches together; of a step of 32
tokens of the fused kernel, however few heads there are."""


def pays(items: int, processors: int) -> bool:
    """Are ``items`` sequences and value heads few enough for segments?

    In segments every multiprocessor works, whatever the heads: the time is what there is to do, divided by them. The
    fused kernel takes a step after the other, however idle the device is. Both grow with the tokens alike; and the
    number of tokens may not decide, because appending some would change the bits of those before.
    """
    return items * _UNIT <= 2 * _STEP * processors


def segment_chunks(items: int) -> int:
    """Chunks of 64 tokens in a segment.

    Longer ones leave fewer maps to chain (1300 cycles each), shorter ones more blocks to walk (3700 cycles a chunk).
    Sixteen make 128 blocks at 16 heads and 8192 tokens; fewer heads have multiprocessors to spare for twice as many.
    """
    return 16 if items > 6 else 8


def packaged_kernels() -> Iterator[KernelSource]:
    """The kernels shipped: all there are."""
    for float_gate, safe in product((False, True), repeat=2):
        yield prepare_kernel(float_gate, safe, records=True).source
    for kernel in (maps_kernel(), chain_kernel(4), chain_kernel(8), output_kernel(1), output_kernel(2)):
        yield kernel.source
