"""The kernels of ``chunk_kda`` in segments on Hopper, K = V = 128."""

from __future__ import annotations

from functools import cache

from kdacore_cuda.forms.backward.kernels import prepare_kernel
from kdacore_cuda.kernel_parameters import CHUNK_BACKWARD, PREPARE_MARKED, SEGMENTS
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_SOURCES = "sm90/chunk_forward/segments"


@cache
def segments_prepare_kernel(float_gate: bool, bounded: bool, leaving_only: bool = False) -> Kernel:
    """The operands of every chunk, one block per unit, as of
    :func:`kdacore_cuda.forms.backward.kernels.prepare_kernel`, which makes them of unbounded gates."""
    if not bounded:
        return prepare_kernel(float_gate, bounded, for_segments=True, leaving_only=leaving_only)
    flags = {"G_FLOAT": float_gate, "BOUNDED": True, "FOR_SEGMENTS": True}
    return make_kernel(f"{_SOURCES}/prepare", CHUNK_BACKWARD, **flags, LEAVING_ONLY=leaving_only or None)


@cache
def prepare_marked_kernel(float_gate: bool, bounded: bool) -> Kernel:
    """:func:`segments_prepare_kernel`, also of chunks cut off at checkpoints: one block each."""
    plain = segments_prepare_kernel(float_gate, bounded)
    return make_kernel(f"{_SOURCES}/prepare_marked", PREPARE_MARKED, **dict(plain.source.defines))


@cache
def maps_kernel() -> Kernel:
    """How each segment maps the state at its start to the state at its end: two blocks per segment
    and value head."""
    return make_kernel(f"{_SOURCES}/maps", SEGMENTS, WARPGROUPS=1)


@cache
def maps_of_slice_kernel(leaving_only: bool) -> Kernel:
    """:func:`maps_kernel` of a slice of a row, from an unknown state; ``leaving_only``: of the sequence that goes on
    behind the slice alone."""
    return make_kernel(f"{_SOURCES}/maps", SEGMENTS, WARPGROUPS=1, OF_SLICE=True, LEAVING_ONLY=leaving_only)


@cache
def chain_kernel(blocks: int = 4) -> Kernel:
    """The state at the start of every segment: ``blocks`` (4 or 8, same bits) per sequence and
    value head."""
    return make_kernel(f"{_SOURCES}/chain", SEGMENTS, ROWS=128 // blocks)


@cache
def output_kernel(blocks: int = 1, paired: bool = False, composes: bool = False) -> Kernel:
    """Outputs, checkpoints and final states: ``blocks`` (1 or 2, same bits) per segment and value
    head.

    Args:
        blocks: 1 with all rows of the state, or 2 with half of them each.
        paired: the two blocks are a cluster, and each loads half of every record for both (same bits).
        composes: the blocks also do what :func:`chain_kernel` does, each for the segment that it has
            (:func:`output_composes`).
    """
    flags = {"CLUSTER": 2 if paired else None, "COMPOSES": composes or None, "LAST_READER": True}
    return make_kernel(f"{_SOURCES}/output", SEGMENTS, WARPGROUPS=2 // blocks, **flags)


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
