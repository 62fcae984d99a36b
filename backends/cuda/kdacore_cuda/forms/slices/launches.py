"""The launches of ``chunk_kda`` on a slice of a row that continues on other ranks, on Hopper, as data: those of the
forward in segments (:mod:`kdacore_cuda.forms.segments.launches`) and of the backward in segments
(:mod:`kdacore_cuda.forms.backward.segments`), cut where ranks exchange states and gradients of states.

Forward, before the exchange: prepare (operands of every chunk), maps (how each segment maps the state at its start to
the state at its end), transition (the maps of the leaving part composed). After it: starts (the state at each segment's
start), output (every segment from its start). Packs of many sequences compute operands and maps of the leaving part
alone, and their results by a call of their own.

Backward, before: prepare, maps (how each segment changes the state and its gradient), slice gradient (the gradient of
the state at the slice's start, as far as it comes from here). After: chain (the state at each segment's start, its
gradient at each end), scan, and the launches behind the scan of a whole call.
"""

from __future__ import annotations

from functools import cache

from kdacore.types import InputGrads, Request
from kdacore_cuda.choice import finishes_as_whole
from kdacore_cuda.forms.backward import launches as whole_backward
from kdacore_cuda.forms.backward.kernels import (
    prepare_kernel,
    scan_kernel,
    segment_maps_kernel,
    walk_warpgroups,
)
from kdacore_cuda.forms.backward.segments import workspace_bytes
from kdacore_cuda.forms.backward.workspace import READ_BY_SCAN_ONLY, UNIT_BYTES, WORKSPACE, Buffer
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, takes_float_gate
from kdacore_cuda.forms.launches import Launches
from kdacore_cuda.forms.segments.kernels import (
    maps_of_slice_kernel,
    output_blocks,
    output_kernel,
    segments_prepare_kernel,
)
from kdacore_cuda.forms.segments.segment_lengths import chain_blocks
from kdacore_cuda.forms.segments.workspace import CHUNK_OPERANDS_BYTES, START_BYTES
from kdacore_cuda.forms.slices.halves import (
    BEGIN_ARRAYS,
    GIVEN,
    SEGMENT_FIELDS,
    BackwardSliceLaunches,
    ForwardSliceLaunches,
    SliceSegments,
    saved_places,
    starts_step,
    transition_step,
)
from kdacore_cuda.forms.slices.kernels import chain_kernel, slice_gradient_kernel
from kdacore_cuda.kernel_parameters import FLAGS, SEGMENT_LENGTHS
from kdacore_cuda.request_encoding import has_bounded_gate
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_cuda.runtime.program import NOTHING, Launch, Program, Value

FINISH_ARRAYS = ("v", "cu_seqlens", "starts", "workspace", "saved", "o", "final_state", "checkpoints")
BACKWARD_ARRAYS = (
    *(*GIVEN, "d_o", "starts", "saved", "operands", "borders", "both"),
    *("d_final", "d_slice_start", "ends", "d_starts"),
)


def forward_launches(r: Request) -> ForwardSliceLaunches:
    """The launches of a slice's forward, given contiguous arrays."""
    numbers, multiprocessors = chunk_numbers(r), multiprocessors_of(r)
    units, cut = int(numbers["units"]), SliceSegments.of(r)
    segments = cut.slots * r.HV
    as_whole = finishes_as_whole(r.N * r.HV, r.packed, multiprocessors)
    outputs = output_blocks(segments, multiprocessors)
    saved, saved_bytes = saved_places(segments)
    numbers |= {
        **cut.numbers(r),
        **saved,
        "no_null_index": -1,
        "addends_at": units * CHUNK_OPERANDS_BYTES,
        "prepare_blocks": units,
        "map_blocks": 2 * segments,
        "output_blocks": outputs * segments,
    }
    names, arch = tuple(numbers), arch_of(r)
    blocks, start_blocks = cut.forward_kernels
    begin = _begin_program(takes_float_gate(r), has_bounded_gate(r), as_whole, blocks, names)
    finish = _finish_program(start_blocks, outputs, names)
    buffers = {
        "workspace": units * CHUNK_OPERANDS_BYTES + segments * START_BYTES,
        "saved": saved_bytes,
    }
    return ForwardSliceLaunches(
        Launches(begin, numbers, arch, buffers),
        None if as_whole else Launches(finish, numbers, arch),
        cut.results,
    )


_SEGMENT_FIELDS: dict[str, Value] = {
    **SEGMENT_FIELDS,
    "chunk_operands": "workspace",
    "ht": "final_state",
    "ckpt": "checkpoints",
    "null_index": "no_null_index",
    "marks": NOTHING,
}
"""Of maps, starts and output: no pools, no checkpoints at chosen tokens."""


@cache
def _begin_program(
    float_gate: bool, bounded: bool, as_whole: bool, blocks: int, numbers: tuple[str, ...]
) -> Program:
    prepare = segments_prepare_kernel(float_gate, bounded, as_whole)
    no_lengths = dict.fromkeys((*SEGMENT_LENGTHS, "segments"), NOTHING)
    fields = _SEGMENT_FIELDS | {"ht": NOTHING, "ckpt": NOTHING}
    steps = (
        Launch("prepare", prepare, "prepare_blocks", {"last": "workspace", **no_lengths}),
        Launch("maps", maps_of_slice_kernel(as_whole), "map_blocks", fields),
        transition_step(blocks),
    )
    return Program(steps, BEGIN_ARRAYS, numbers)


@cache
def _finish_program(start_blocks: int, outputs: int, numbers: tuple[str, ...]) -> Program:
    fields = _SEGMENT_FIELDS | {"h0": "starts"}
    steps = [*starts_step(start_blocks), Launch("output", output_kernel(outputs), "output_blocks", fields)]
    return Program(steps, FINISH_ARRAYS, numbers, one_segment=not start_blocks)


def backward_launches(
    r: Request, wanted: InputGrads, saved: bool = False, sums_to_caller: bool = False
) -> BackwardSliceLaunches:
    """The launches of a slice's backward, given contiguous arrays.

    Args:
        r: the slice's call.
        wanted: as of :func:`kdacore_cuda.forms.backward.launches.launches_of`.
        saved: the forward's maps and states of segments are there.
        sums_to_caller: as of that function.
    """
    numbers, multiprocessors, cut = chunk_numbers(r), multiprocessors_of(r), SliceSegments.of(r)
    units, items, walks = int(numbers["units"]), r.N * r.HV, cut.slots * r.HV
    walks_of_maps, directions = (1, 1) if saved else (3, 2)
    maps_warpgroups = walk_warpgroups(walks_of_maps * walks, multiprocessors)
    scan_warpgroups = walk_warpgroups(2 * walks, multiprocessors)
    gradient_blocks = chain_blocks(cut.results * r.HV, multiprocessors)
    blocks = chain_blocks(directions * items, multiprocessors)

    whole = whole_backward.launches_of(r, wanted, sums_to_caller=sums_to_caller)
    operands, borders, offsets = Buffer(), Buffer(), dict[str, int]()
    for name, size in UNIT_BYTES.items():
        if name in READ_BY_SCAN_ONLY:
            offsets[name] = operands.add(units * size)
    for name, size in workspace_bytes(walks).items():
        if not (saved and name != "ends"):
            offsets[name] = (borders if name in ("starts", "ends") else operands).add(size)
    lengths = cut.lengths()
    numbers |= (
        lengths
        | {f"{name}_at": at for name, at in offsets.items()}
        | (saved_places(walks)[0] if saved else {})
        | {
            # What the gradients kernel reads lies where the second group of a whole call expects it.
            **{f"{name}_at": whole.first.numbers[f"{name}_at"] for name in _IN_BOTH},
            "prepare_blocks": units,
            "maps_blocks": 2 // maps_warpgroups * walks_of_maps * walks,
            "slice_gradient_blocks": gradient_blocks * cut.results * r.HV,
            "chain_blocks": directions * blocks * items,
            "scan_blocks": 2 // scan_warpgroups * 2 * walks,
        }
    )
    if saved:
        numbers["flags"] = int(numbers["flags"]) | FLAGS["KEPT_MAPS"]
    names, arch = tuple(numbers), arch_of(r)
    before = (
        ("prepare", prepare_kernel(takes_float_gate(r), has_bounded_gate(r))),
        ("maps", segment_maps_kernel(maps_warpgroups, of_slice=True)),
        ("slice_gradient", slice_gradient_kernel(gradient_blocks)),
    )
    behind = ("chain", chain_kernel(blocks)), ("scan", scan_kernel(scan_warpgroups, in_segments=True))
    begin = _backward_program(before, ("d_final", "d_slice_start"), saved, names)
    scan = _backward_program(behind, ("ends", "d_starts"), saved, names)
    both = whole.first.buffers["both"]
    buffers = {"operands": operands.bytes, "borders": borders.bytes, "both": both}
    second = whole.second._replace(numbers=whole.second.numbers | lengths | {"flags": numbers["flags"]})
    return BackwardSliceLaunches(
        Launches(begin, numbers, arch, buffers), Launches(scan, numbers, arch), second, cut.results
    )


_IN_BOTH = frozenset(WORKSPACE) - READ_BY_SCAN_ONLY
_WITH_ENDS = frozenset({"slice_gradient", "chain", "scan"})
"""Launches that take gradients of states; maps are those of an unknown one."""


@cache
def _backward_program(
    launches: tuple[tuple[str, Kernel], ...], flows: tuple[str, str], saved: bool, numbers: tuple[str, ...]
) -> Program:
    """``flows``: the gradients of states that the launches read and write."""
    fields: dict[str, Value] = {
        name: ("both" if name in _IN_BOTH else "operands", f"{name}_at") for name in WORKSPACE
    }
    fields |= {
        "maps": ("saved" if saved else "operands", "maps_at"),
        "starts": ("saved" if saved else "borders", "starts_at"),
        "ends": ("borders", "ends_at"),
        "h0": "starts",
    }
    with_ends = fields | dict(zip(("d_ht", "d_h0"), flows, strict=True))
    steps = [
        Launch(name, kernel, f"{name}_blocks", with_ends if name in _WITH_ENDS else fields)
        for name, kernel in launches
    ]
    return Program(steps, BACKWARD_ARRAYS, numbers)
