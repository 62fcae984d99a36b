"""The kernels of ``chunk_gated_delta_rule`` on Hopper, K = V = 128."""

from __future__ import annotations

from functools import cache

from kdacore_cuda.kernel_parameters import (
    GATED_DELTA,
    GATED_DELTA_BACKWARD,
    GATED_DELTA_BACKWARD_SEGMENTS,
    GATED_DELTA_BESIDE,
    GATED_DELTA_SEGMENTS,
    SUMS,
    ParamStruct,
)
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_SOURCES = "sm90/gated_delta"


@cache
def records_kernel() -> Kernel:
    """The record of every chunk and value head: a block for each chunk and key head."""
    return make_kernel(f"{_SOURCES}/chunk_records", GATED_DELTA)


RECORD_PLACES = 2
"""Units, chunks of a key head, that a block of :func:`records_beside_kernel` makes at once."""
BLOCKS_BESIDE = 2
"""Blocks of :func:`walk_beside_kernel` for each sequence and value head."""


@cache
def records_beside_kernel() -> Kernel:
    """The same records by blocks that live as long as the launch, each on a multiprocessor of its own."""
    return make_kernel(f"{_SOURCES}/chunk_records_beside", GATED_DELTA_BESIDE)


def records_blocks_beside(units: int, items: int, multiprocessors: int) -> int:
    """Blocks of :func:`records_beside_kernel`: one for each multiprocessor that the walks of ``items`` sequences times
    value heads leave, as far as there are ``units`` for them."""
    return min(-(-units // RECORD_PLACES), max(1, multiprocessors - BLOCKS_BESIDE * items))


@cache
def walk_beside_kernel() -> Kernel:
    """:func:`walk_kernel` with one warpgroup, beside :func:`records_beside_kernel`. The same bits."""
    return make_kernel(f"{_SOURCES}/walk_records_beside", GATED_DELTA_BESIDE, WARPGROUPS=2 // BLOCKS_BESIDE)


@cache
def walk_kernel(warpgroups: int, keeps: bool = False) -> Kernel:
    """Outputs and states of every sequence and value head, from the records.

    Args:
        warpgroups: per block. 2: a block carries a whole state; 1: two blocks share one. The same bits.
        keeps: also stores each chunk's u and the state at its start, for a backward; its parameters are
            :data:`~kdacore_cuda.kernel_parameters.GATED_DELTA_BACKWARD`.
    """
    if keeps:
        return make_kernel(f"{_SOURCES}/walk_records_keeping", GATED_DELTA_BACKWARD, WARPGROUPS=warpgroups)
    return make_kernel(f"{_SOURCES}/walk_records", GATED_DELTA, WARPGROUPS=warpgroups)


@cache
def first_segments_kernel(of_slice: bool = False) -> Kernel:
    """The first segment of every sequence and value head, walked from its start, beside the maps of the others: two
    blocks each. ``of_slice``: of a slice of a row, from an unknown state: maps alone."""
    return _of_segments("walk_first_segments", GATED_DELTA_SEGMENTS, of_slice)


@cache
def later_segments_kernel(of_slice: bool = False) -> Kernel:
    """All other segments, walked from their starts: two blocks each. ``of_slice``: the first ones, too."""
    return _of_segments("walk_later_segments", GATED_DELTA_SEGMENTS, of_slice)


@cache
def outer_segments_kernel(of_slice: bool = False) -> Kernel:
    """What a backward keeps of every sequence's first segment, the gradients of every last one, and the maps of those
    between, of states and of gradients: two blocks each. ``of_slice``: of a slice of a row, from an unknown gradient:
    no last ones, and maps of the outermost segments, too."""
    return _of_segments("walk_outer_segments", GATED_DELTA_BACKWARD_SEGMENTS, of_slice)


@cache
def inner_segments_kernel(of_slice: bool = False) -> Kernel:
    """What a backward keeps of all other segments, and the gradients of all but the last: two blocks each.
    ``of_slice``: of the last ones, too."""
    return _of_segments("walk_inner_segments", GATED_DELTA_BACKWARD_SEGMENTS, of_slice)


def _of_segments(name: str, params: ParamStruct, of_slice: bool) -> Kernel:
    return make_kernel(f"{_SOURCES}/{name}", params, WARPGROUPS=1, OF_SLICE=of_slice or None)


@cache
def grads_kernel() -> Kernel:
    """Every input gradient of a chunk and key head; a block per multiprocessor loops over them."""
    return make_kernel(f"{_SOURCES}/unit_grads", GATED_DELTA_BACKWARD)


@cache
def backward_walk_kernel(warpgroups: int, with_states: bool) -> Kernel:
    """The gradients of v and of every chunk's state, from the records: a walk from each sequence's end.

    Args:
        warpgroups: as of :func:`walk_kernel`; the grid has ``2 // warpgroups`` blocks a sequence and value head.
        with_states: as many more blocks recompute u and the states, beside them.
    """
    return make_kernel(
        f"{_SOURCES}/walk_backward", GATED_DELTA_BACKWARD, WARPGROUPS=warpgroups, WITH_STATES=with_states
    )


@cache
def sums_kernel() -> Kernel:
    """Gradients of A_log and dt_bias: sums over chunks, one block a value head."""
    return make_kernel(f"{_SOURCES}/gate_sums", SUMS)
