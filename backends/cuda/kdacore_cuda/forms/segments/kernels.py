"""The kernels of ``chunk_kda`` in segments on Hopper, K = V = 128."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.shared_memory import shared_bytes
from kdacore_cuda.forms.backward.kernels import ChunkBackwardKernel, prepare_kernel
from kdacore_cuda.forms.segments.sizes import CHAIN_THREADS

_SOURCES = "sm90/chunk_forward/segments"
MAPS_THREADS = 256
"""Threads of a block of maps."""


class SegmentsKernel(NamedTuple):
    """One launch. Those after prepare take :data:`kdacore_cuda.kernel_parameters.SEGMENTS`."""

    source: KernelSource
    threads: int

    @property
    def shared(self) -> int:
        """Dynamic shared memory in bytes."""
        return shared_bytes(self.source)


def _kernel(name: str, threads: int, **defines: int) -> SegmentsKernel:
    return SegmentsKernel(KernelSource(f"{_SOURCES}/{name}.cu", name, tuple(defines.items())), threads)


@cache
def segments_prepare_kernel(
    float_gate: bool, bounded: bool, leaving_only: bool = False
) -> ChunkBackwardKernel:
    """The operands of every chunk, one block per unit.

    Args:
        float_gate: ``g`` is float32, not bfloat16.
        bounded: every log decay lies in [-5, 0]. Else the backward's kernel does it.
        leaving_only: of the sequence of a pack that ends at T alone.
    """
    if not bounded:
        return prepare_kernel(float_gate, bounded, for_segments=True, leaving_only=leaving_only)
    macros: tuple[tuple[str, int], ...] = (
        ("G_FLOAT", int(float_gate)),
        ("BOUNDED", 1),
        ("FOR_SEGMENTS", 1),
    )
    if leaving_only:
        macros += (("LEAVING_ONLY", 1),)
    source = KernelSource(f"{_SOURCES}/prepare.cu", "prepare", macros)
    return ChunkBackwardKernel(source, 256, lambda units, heads, multiprocessors: units)


@cache
def prepare_marked_kernel(float_gate: bool, bounded: bool) -> SegmentsKernel:
    """Operands of every chunk, and of chunks cut off at checkpoints: one block each. Takes
    :data:`kdacore_cuda.kernel_parameters.PREPARE_MARKED`.

    Args:
        float_gate: ``g`` is float32, not bfloat16.
        bounded: every log decay lies in [-5, 0]. Else it does what the backward's kernel does.
    """
    plain = segments_prepare_kernel(float_gate, bounded)
    source = KernelSource(f"{_SOURCES}/prepare_marked.cu", "prepare_marked", plain.source.defines)
    return SegmentsKernel(source, plain.threads)


@cache
def maps_kernel() -> SegmentsKernel:
    """How each segment maps the state at its start to the state at its end: two blocks per segment
    and value head."""
    return _kernel("maps", MAPS_THREADS, WARPGROUPS=1)


@cache
def chain_kernel(blocks: int = 4) -> SegmentsKernel:
    """The state at the start of every segment: ``blocks`` (4 or 8, same bits) per sequence and
    value head."""
    return _kernel("chain", CHAIN_THREADS, ROWS=128 // blocks)


@cache
def output_kernel(blocks: int = 1, paired: bool = False, composes: bool = False) -> SegmentsKernel:
    """Outputs, checkpoints and final states: ``blocks`` (1 or 2, same bits) per segment and value
    head.

    Args:
        blocks: 1 with all rows of the state, or 2 with half of them each.
        paired: the two blocks are a cluster, and each loads half of every record for both (same bits).
        composes: the blocks also do what :func:`chain_kernel` does, each for the segment that it has
            (:func:`output_composes`).
    """
    defines = (
        {"WARPGROUPS": 2 // blocks}
        | ({"CLUSTER": 2} if paired else {})
        | ({"COMPOSES": 1} if composes else {})
        | {"LAST_READER": 1}
    )
    return _kernel("output", 384 if blocks == 1 else 160, **defines)


def output_blocks(items: int, multiprocessors: int) -> int:
    """Blocks per segment and value head of :func:`output_kernel`, given how many of those there
    are: 2 where each block still finds a multiprocessor of its own."""
    return 2 if 2 * items <= multiprocessors else 1


def output_is_paired(items: int, blocks: int, composes: bool) -> bool:
    """Whether the two blocks of a segment are a cluster in :func:`output_kernel`, given sequences times value heads
    and how many blocks a segment has.

    With 9 to 14 of them output waits for L2, and loading each record once takes up to 10 % off it; with 4 to 8 that
    is so for the maps that its blocks load where they compose. Elsewhere waiting for two blocks costs more than it
    saves, except where they compose with 15 or more: such a launch begins while maps end, its blocks begin at
    different times, and two blocks that are not a cluster then take up to 10 % longer. Probably each loads the records,
    which do not stay in L2, from memory.
    """
    return blocks == 2 and (items >= 4 if composes else 9 <= items <= 14)


def output_composes(segments: int, blocks: int) -> bool:
    """Whether the blocks of :func:`output_kernel` find start states themselves (same bits), given segments a sequence
    and blocks a segment. Only for dense sequences that begin with zeros.

    A launch less saves 5 us, but a block takes as many steps as segments come before its own, of 1,800 cycles instead
    of the chain's 1,300.
    """
    return blocks == 2 and 1 < segments <= 14


def output_begins_early(chain_blocks: int, multiprocessors: int) -> bool:
    """Whether the blocks of :func:`output_kernel` are launched while the chain still runs, given its blocks.

    Where the chain leaves most multiprocessors idle that saves 2 us. With more blocks it costs up to 19 us, probably
    since the blocks of output then begin at different times (:func:`output_is_paired`).
    """
    return 4 * chain_blocks <= multiprocessors


def packaged_segments_kernels() -> Iterator[KernelSource]:
    """The segments kernels shipped: all there are."""
    for float_gate, bounded in product((False, True), repeat=2):
        yield segments_prepare_kernel(float_gate, bounded).source
        yield prepare_marked_kernel(float_gate, bounded).source
    for kernel in (maps_kernel(), chain_kernel(4), chain_kernel(8)):
        yield kernel.source
    for kernel in (output_kernel(1), output_kernel(2), output_kernel(2, paired=True)):
        yield kernel.source
    for paired in (False, True):
        yield output_kernel(2, paired, composes=True).source
