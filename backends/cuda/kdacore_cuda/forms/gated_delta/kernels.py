"""The kernels of ``chunk_gated_delta_rule`` on Hopper, K and V up to 128."""

from __future__ import annotations

from functools import cache

from kdacore_cuda.gated_delta_variant import WIDE, Variant
from kdacore_cuda.kernel_parameters import (
    GATED_DELTA,
    GATED_DELTA_BACKWARD,
    GATED_DELTA_BACKWARD_SEGMENTS,
    GATED_DELTA_BESIDE,
    GATED_DELTA_RECORDS,
    GATED_DELTA_SEGMENTS,
    SUMS,
    ParamStruct,
)
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_SOURCES = "sm90/gated_delta"


# In the functions that follow ``of`` is the variant.


def _kernel(name: str, params: ParamStruct, of: Variant = WIDE, **macros: int | None) -> Kernel:
    return _made(name, params, of._replace(marks=False), tuple(macros.items()))


def _walk(name: str, params: ParamStruct, of: Variant, **macros: int | None) -> Kernel:
    """One that may write checkpoints at chosen tokens."""
    return _made(name, params, of, tuple(macros.items()))


@cache
def _made(name: str, params: ParamStruct, of: Variant, macros: tuple[tuple[str, int | None], ...]) -> Kernel:
    variant = {"NARROW": of.narrow or None, "HALF_F16": of.float16 or None, "MARKS": of.marks or None}
    size = None if of.size == WIDE.size else of.size
    return make_kernel(f"{_SOURCES}/{name}", params, SIZE=size, **variant, **dict(macros))


def records_kernel(of: Variant = WIDE) -> Kernel:
    """The record of every chunk and value head, by :func:`records_blocks` blocks."""
    return _kernel("chunk_records", GATED_DELTA_RECORDS, of)


def records_blocks(units: int, multiprocessors: int) -> int:
    """Blocks of :func:`records_kernel`, each of which makes one of the ``units`` (chunks of key heads) after another:
    as many as run at the same time, two on a multiprocessor."""
    return min(units, 2 * multiprocessors)


RECORD_PLACES = 2
"""Units, chunks of a key head, that a block of :func:`records_beside_kernel` makes at once."""


def records_beside_kernel(of: Variant = WIDE) -> Kernel:
    """The same records by blocks that live as long as the launch, each on a multiprocessor of its own."""
    return _kernel("chunk_records_beside", GATED_DELTA_BESIDE, of)


def records_blocks_beside(units: int, walking: int, multiprocessors: int) -> int:
    """Blocks of :func:`records_beside_kernel`: one for each multiprocessor that the ``walking`` blocks leave, as far as
    there are ``units`` for them."""
    return min(-(-units // RECORD_PLACES), max(1, multiprocessors - walking))


def walk_beside_kernel(of: Variant = WIDE) -> Kernel:
    """:func:`walk_kernel` with one warpgroup, beside :func:`records_beside_kernel`. The same bits."""
    return _walk("walk_records_beside", GATED_DELTA_BESIDE, of, WARPGROUPS=1)


def walk_kernel(warpgroups: int, keeps: bool = False, of: Variant = WIDE) -> Kernel:
    """Outputs and states of every sequence and value head, from the records.

    Args:
        warpgroups: per block. 2: a block carries a whole state; 1: two blocks share one. The same bits. A state of 64
            values is one warpgroup's.
        keeps: also stores each chunk's u and the state at its start, for a backward; its parameters are
            :data:`~kdacore_cuda.kernel_parameters.GATED_DELTA_BACKWARD`.
    """
    if keeps:
        return _kernel("walk_records_keeping", GATED_DELTA_BACKWARD, of, WARPGROUPS=warpgroups)
    return _walk("walk_records", GATED_DELTA, of, WARPGROUPS=warpgroups)


def first_segments_kernel(of: Variant = WIDE, of_slice: bool = False, composes: bool = False) -> Kernel:
    """The first segment of every sequence and value head, walked from its start, beside the maps of the others: two
    blocks each.

    Args:
        of_slice: of a slice of a row, from an unknown state: maps alone.
        composes: ahead of :func:`later_segments_kernel` with ``composes``.
    """
    return _segments_kernel("walk_first_segments", of, of_slice, composes)


def later_segments_kernel(of: Variant = WIDE, of_slice: bool = False, composes: bool = False) -> Kernel:
    """All other segments, walked from their starts: two blocks each.

    Args:
        of_slice: of a slice of a row: the first ones, too.
        composes: the blocks find these starts themselves, from the maps of the segments before theirs. The same bits.
    """
    return _segments_kernel("walk_later_segments", of, of_slice, composes)


def _segments_kernel(name: str, of: Variant, of_slice: bool, composes: bool) -> Kernel:
    forms = {"OF_SLICE": of_slice or None, "COMPOSES": composes or None}
    return _walk(name, GATED_DELTA_SEGMENTS, of, WARPGROUPS=1, **forms)


def to_checkpoints_kernel(of: Variant = WIDE) -> Kernel:
    """Checkpoints at chosen tokens, from the states at the start of their chunks: blocks of 64 values."""
    return _kernel("walk_to_checkpoints", GATED_DELTA, of, WARPGROUPS=1)


def outer_segments_kernel(of: Variant = WIDE, of_slice: bool = False) -> Kernel:
    """What a backward keeps of every sequence's first segment, the gradients of every last one, and the maps of those
    between, of states and of gradients: two blocks each. ``of_slice``: of a slice of a row, from an unknown gradient:
    no last ones, and maps of the outermost segments, too."""
    macros = {"WARPGROUPS": 1, "OF_SLICE": of_slice or None}
    return _kernel("walk_outer_segments", GATED_DELTA_BACKWARD_SEGMENTS, of, **macros)


def inner_segments_kernel(of: Variant = WIDE, of_slice: bool = False) -> Kernel:
    """What a backward keeps of all other segments, and the gradients of all but the last: two blocks each.
    ``of_slice``: of the last ones, too."""
    macros = {"WARPGROUPS": 1, "OF_SLICE": of_slice or None}
    return _kernel("walk_inner_segments", GATED_DELTA_BACKWARD_SEGMENTS, of, **macros)


def grads_kernel(of: Variant = WIDE) -> Kernel:
    """Every input gradient of a chunk and key head; a block per multiprocessor loops over them."""
    return _kernel("unit_grads", GATED_DELTA_BACKWARD, of)


def backward_walk_kernel(warpgroups: int, with_states: bool, of: Variant = WIDE) -> Kernel:
    """The gradients of v and of every chunk's state, from the records: a walk from each sequence's end.

    Args:
        warpgroups: as of :func:`walk_kernel`; the grid has a block for each ``64 * warpgroups`` values.
        with_states: as many more blocks recompute u and the states, beside them.
    """
    return _kernel("walk_backward", GATED_DELTA_BACKWARD, of, WARPGROUPS=warpgroups, WITH_STATES=with_states)


def sums_kernel() -> Kernel:
    """Gradients of A_log and dt_bias: sums over chunks, one block a value head."""
    return _kernel("gate_sums", SUMS)
