"""The kernels of the chunk backward on Hopper, whole and in segments: how each is compiled.

Arguments that kernels of other forms have too: ``float_gate``: ``g`` is float32, not bfloat16; ``bounded``: every log
decay lies in [-5, 0], so that one exponent anchor serves half a chunk; ``narrow``: heads have other channels and values
than 128 (csrc/sm90/head_dims.cuh).
"""

from __future__ import annotations

from functools import cache

from kdacore_cuda.kernel_parameters import CHUNK_BACKWARD, GROUPS, SCAN_OUTPUTS, SUMS
from kdacore_cuda.runtime.kernel import Kernel, make_kernel

_SOURCES = "sm90/chunk_backward"
_SUMS_THREADS, GROUPS_THREADS = 512, 256


@cache
def sums_kernel(narrow: bool = False) -> Kernel:
    """Sums over chunks, one block per value head."""
    return make_kernel(f"{_SOURCES}/sums", SUMS, THREADS=_SUMS_THREADS, NARROW=narrow or None)


@cache
def groups_kernel(narrow: bool = False) -> Kernel:
    """Sums over the value heads of a group, one warp per row."""
    return make_kernel(f"{_SOURCES}/groups", GROUPS, THREADS=GROUPS_THREADS, NARROW=narrow or None)


def walk_warpgroups(walks: int, multiprocessors: int) -> int:
    """Warpgroups per block, same bits, for so many walks over a state's tokens: 1, with half of the rows each, where
    two blocks per walk still find a multiprocessor each; else 2."""
    return 1 if 2 * walks <= multiprocessors else 2


@cache
def scan_kernel(warpgroups: int, in_segments: bool = False, narrow: bool = False) -> Kernel:
    """States forward and their gradients in reverse: two walks per sequence and value head, one block each
    (``warpgroups`` 2) or two. ``in_segments``: two walks per segment, from its start and from its end."""
    macros = {"WARPGROUPS": warpgroups, "IN_SEGMENTS": in_segments or None, "NARROW": narrow or None}
    return make_kernel(f"{_SOURCES}/scan", CHUNK_BACKWARD, **macros)


@cache
def scan_outputs_kernel(warpgroups: int, narrow: bool = False) -> Kernel:
    """States and outputs of a forward that saves what its backward would recompute: one walk per sequence and value
    head, as in :func:`scan_kernel`."""
    return make_kernel(f"{_SOURCES}/scan_outputs", SCAN_OUTPUTS, WARPGROUPS=warpgroups, NARROW=narrow or None)


@cache
def segment_maps_kernel(warpgroups: int, of_slice: bool = False) -> Kernel:
    """How each segment changes the state and its gradient: three walks per segment and value head,
    one block each (``warpgroups`` 2) or two. ``of_slice``: of a slice of a row, from an unknown gradient."""
    macros = {"WARPGROUPS": warpgroups, "OF_SLICE": of_slice or None}
    return make_kernel(f"{_SOURCES}/segment_maps", CHUNK_BACKWARD, **macros)


@cache
def segment_chain_kernel(blocks: int) -> Kernel:
    """The state at the start of every segment and its gradient at the end of every segment:
    ``blocks`` (4 or 8, same bits) per sequence, value head and direction."""
    return make_kernel(f"{_SOURCES}/segment_chain", CHUNK_BACKWARD, ROWS=128 // blocks)


@cache
def prepare_kernel(
    float_gate: bool,
    bounded: bool = True,
    for_segments: bool = False,
    leaving_only: bool = False,
    narrow: bool = False,
) -> Kernel:
    """Operands of each chunk, one block per unit; ``leaving_only``: of the sequence of a pack that ends at T alone.

    ``for_segments``: the operands that :mod:`kdacore_cuda.forms.segments.launches` needs, one block of memory per unit;
    else those of the backward, one array each. For bounded gates
    :func:`kdacore_cuda.forms.segments.kernels.segments_prepare_kernel` is faster.
    """
    more = {
        "FOR_SEGMENTS": for_segments or None,
        "LEAVING_ONLY": leaving_only or None,
        "NARROW": narrow or None,
    }
    return make_kernel(f"{_SOURCES}/prepare", CHUNK_BACKWARD, G_FLOAT=float_gate, BOUNDED=bounded, **more)


@cache
def grads_kernel(float_gate: bool, grouped: bool, bounded: bool = True, narrow: bool = False) -> Kernel:
    """Every input gradient of a unit; one block per multiprocessor loops over units. ``grouped``: HV > H: dq and dk are
    float32 and one per value head, to be summed by :func:`groups_kernel`."""
    flags = {"G_FLOAT": float_gate, "GROUPED": grouped, "BOUNDED": bounded}
    return make_kernel(f"{_SOURCES}/grads", CHUNK_BACKWARD, **flags, NARROW=narrow or None)
