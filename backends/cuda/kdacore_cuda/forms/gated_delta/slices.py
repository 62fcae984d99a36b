"""The launches of ``chunk_gated_delta_rule`` on a slice of a row that continues on other ranks, as data: those of
calls with few heads (:mod:`kdacore_cuda.forms.gated_delta.segments`,
:mod:`kdacore_cuda.forms.gated_delta.backward_segments`), cut where ranks exchange states and gradients of states. What
composes maps is that of ``chunk_kda``'s slices.

Forward, before the exchange: records of all chunks, maps (how each segment changes the state at its start), transition
(the maps of the leaving part composed). After it: starts (the state at each segment's start), and every segment walked
from there.

Backward, before: records, outer (first segments walked forward, and maps of the others, of states and of gradients),
slice gradient (the gradient of the state at the slice's start, as far as it comes from here). After: chain (the state
at each segment's start, its gradient at each end), inner (all but first segments forward, all in reverse), and the
launches behind the walks of a whole call. With what the forward saved, outer makes maps of gradients alone, and inner
walks all segments in both directions.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.types import InputGrads, Request
from kdacore_cuda.forms.backward.launches import GRADIENTS
from kdacore_cuda.forms.backward.segments import workspace_bytes
from kdacore_cuda.forms.backward.workspace import Buffer
from kdacore_cuda.forms.chunk_numbers import chunk_slots
from kdacore_cuda.forms.gated_delta.gradient_launches import GradientLaunches
from kdacore_cuda.forms.gated_delta.kernels import (
    first_segments_kernel,
    inner_segments_kernel,
    later_segments_kernel,
    outer_segments_kernel,
    records_kernel,
)
from kdacore_cuda.forms.gated_delta.launches import call_numbers
from kdacore_cuda.forms.gated_delta.workspace import places
from kdacore_cuda.forms.launches import Launches, made_once
from kdacore_cuda.forms.segments.segment_lengths import chain_blocks
from kdacore_cuda.forms.segments.workspace import START_BYTES
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
from kdacore_cuda.gated_delta_variant import Variant, variant_of
from kdacore_cuda.kernel_parameters import FLAGS
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.program import NOTHING, Clear, Launch, Program, Value

_BEFORE_EXCHANGE = ("records", "u", "states")
"""Arrays of :data:`kdacore_cuda.forms.gated_delta.workspace.UNIT_ARRAYS` that the first half of a backward writes,
``u`` and ``states`` of first segments alone."""


# --- forward -------------------------------------------------------------------------------------------------------


def forward_launches(r: Request) -> ForwardSliceLaunches:
    """The launches of a slice's forward, given contiguous arrays."""
    cut, workspace = SliceSegments.of(r), Buffer()
    segments = cut.slots * r.HV
    numbers = call_numbers(r, for_backward=False) | cut.numbers(r)
    of = variant_of(r, cut=True)
    numbers |= places(("records",), chunk_slots(r) * r.HV, of.size, workspace)
    saved, saved_bytes = saved_places(segments)
    numbers |= saved | {
        "addends_at": workspace.add(segments * START_BYTES),
        "walk_blocks": 2 * segments,
    }
    blocks, start_blocks = cut.forward_kernels
    begin, finish = _begin_program(numbers, of, blocks), _finish_program(numbers, of, start_blocks)
    buffers = {"workspace": workspace.bytes, "saved": saved_bytes}
    arch = arch_of(r)
    return ForwardSliceLaunches(
        Launches(begin, numbers, arch, buffers), Launches(finish, numbers, arch), cut.results
    )


_RECORDS: dict[str, Value] = {"records": ("workspace", "records_at")}


@made_once
def _begin_program(numbers: Iterable[str], of: Variant, blocks: int) -> Program:
    steps = (
        Launch("records", records_kernel(of), "record_blocks", _RECORDS),
        Launch("maps", first_segments_kernel(of, of_slice=True), "walk_blocks", _RECORDS | SEGMENT_FIELDS),
        transition_step(blocks),
    )
    return Program(steps, BEGIN_ARRAYS, tuple(numbers))


@made_once
def _finish_program(numbers: Iterable[str], of: Variant, start_blocks: int) -> Program:
    fields = _RECORDS | SEGMENT_FIELDS | {"h0": "starts", "ht": "final_state", "ckpt": "checkpoints"}
    walk = Launch("walk", later_segments_kernel(of, of_slice=True), "walk_blocks", fields)
    arrays = (*GIVEN, "workspace", "saved", "starts", "o", "final_state", "checkpoints")
    return Program([*starts_step(start_blocks), walk], arrays, tuple(numbers), one_segment=not start_blocks)


# --- backward ------------------------------------------------------------------------------------------------------


def backward_launches(r: Request, wanted: InputGrads, saved: bool = False) -> BackwardSliceLaunches:
    """The launches of a slice's backward, given contiguous arrays. As dv is written by a walk, those after the exchange
    are one group.

    Args:
        r: the slice's call.
        wanted: for each gradient whether a call returns it.
        saved: the forward's maps and states of segments are there.
    """
    cut, multiprocessors, both, workspace = SliceSegments.of(r), multiprocessors_of(r), Buffer(), Buffer()
    segments, items, units = cut.slots * r.HV, r.N * r.HV, chunk_slots(r) * r.HV
    numbers = call_numbers(r, for_backward=True) | cut.lengths()
    of, arch = variant_of(r, cut=True), arch_of(r)
    numbers |= places(_BEFORE_EXCHANGE, units, of.size, both)
    numbers |= places(("state_grads",), units, of.size, workspace)
    if saved:
        numbers |= saved_places(segments)[0]
        numbers["flags"] |= FLAGS["KEPT_MAPS"]
    for name, size in workspace_bytes(segments).items():
        if not (saved and name != "ends"):
            numbers[f"{name}_at"] = both.add(size)
    gradients = GradientLaunches.of(r, wanted, sums_to_caller=False)
    own, buffers = gradients.numbers(r, workspace)
    directions = 1 if saved else 2  # of maps and of the chain
    gradient_blocks = chain_blocks(cut.results * r.HV, multiprocessors)
    blocks = chain_blocks(directions * items, multiprocessors)
    numbers |= own | {
        "outer_blocks": 2 * segments if saved else 2 * (items + 2 * segments),
        "slice_gradient_blocks": gradient_blocks * cut.results * r.HV,
        "chain_blocks": directions * blocks * items,
        "inner_blocks": 4 * segments,
    }
    begin = _backward_begin_program(numbers, of, gradient_blocks, saved)
    finish = _backward_finish_program(numbers, of, blocks, saved, gradients)
    return BackwardSliceLaunches(
        Launches(begin, numbers, arch, {"both": both.bytes}),
        None,
        Launches(finish, numbers, arch, {"workspace": workspace.bytes, **buffers}),
        cut.results,
    )


_OF_CHUNKS: dict[str, Value] = {name: ("both", f"{name}_at") for name in _BEFORE_EXCHANGE} | {
    "h0": "starts",
    "ckpt_every": NOTHING,
}
"""Fields of launches that work on chunks."""


def _of_segments(saved: bool, d_end: str, d_start: str) -> tuple[dict[str, Value], dict[str, Value]]:
    """Fields of launches that work on segments, and more of those that compose maps, given the gradients of states that
    those read and write."""
    buffer = "saved" if saved else "both"
    places: dict[str, Value] = {name: (buffer, f"{name}_at") for name in ("maps", "starts")}
    places["ends"] = "both", "ends_at"
    return places, {**places, "h0": NOTHING, "d_ht": d_end, "d_h0": d_start}


@made_once
def _backward_begin_program(
    numbers: Iterable[str], of: Variant, gradient_blocks: int, saved: bool
) -> Program:
    places, composed = _of_segments(saved, "d_final", "d_slice_start")
    gradient = slice_gradient_kernel(gradient_blocks)
    steps = (
        Launch("records", records_kernel(of), "record_blocks", {"records": _OF_CHUNKS["records"]}),
        Launch("outer", outer_segments_kernel(of, of_slice=True), "outer_blocks", _OF_CHUNKS | places),
        Launch("slice_gradient", gradient, "slice_gradient_blocks", composed),
    )
    arrays = (*GIVEN, "d_o", "starts", "saved", "both", "d_final", "d_slice_start")
    return Program(steps, arrays, tuple(numbers))


@made_once
def _backward_finish_program(
    numbers: Iterable[str], of: Variant, blocks: int, saved: bool, gradients: GradientLaunches
) -> Program:
    places, composed = _of_segments(saved, "ends", "d_starts")
    fields = _OF_CHUNKS | {"state_grads": ("workspace", "state_grads_at"), **gradients.fields()}
    walked = {**fields, **places, "d_ht": "ends", "d_h0": "d_starts"}
    steps: list[Launch | Clear] = [
        *gradients.cleared(),
        Launch("chain", chain_kernel(blocks), "chain_blocks", composed),
        Launch("inner", inner_segments_kernel(of, of_slice=True), "inner_blocks", walked),
        *gradients.steps(fields, of),
    ]
    arrays = (
        *(*GIVEN, "d_o", "starts", "saved", "both", "ends", "d_starts"),
        *("workspace", "second", "zeroed", *GRADIENTS),
    )
    return Program(steps, arrays, tuple(numbers))
