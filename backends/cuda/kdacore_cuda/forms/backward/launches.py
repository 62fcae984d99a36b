"""The launches of the chunk backward on Hopper as data.

Everything is recomputed from the inputs, where the forward has saved nothing
(:mod:`kdacore_cuda.forms.backward.workspace`, :mod:`kdacore_cuda.forms.segments.workspace`), in two groups, so
that memory of the first can become gradients. The first: prepare (operands of each chunk) and scan (states forward and
their gradients in reverse, side by side in one grid; with few heads in segments,
:mod:`kdacore_cuda.forms.backward.segments`). The second: grads (every input gradient of each chunk), and sums (over the
value heads of a group, and over chunks).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from kdacore.types import InputGrads, Request
from kdacore_cuda.fitted_head_dims import SIZE, kernel_request
from kdacore_cuda.forms.backward import kernels, workspace
from kdacore_cuda.forms.backward.segments import WORKSPACE as SEGMENTS_WORKSPACE
from kdacore_cuda.forms.backward.segments import Walks, scan_in_segments
from kdacore_cuda.forms.backward.workspace import WORKSPACE, Buffer
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, chunk_slots, gates_of
from kdacore_cuda.forms.launches import TOKENS, Launches, made_once
from kdacore_cuda.forms.own_head_dims import is_narrow
from kdacore_cuda.kernel_parameters import ITEM_SIZES
from kdacore_cuda.request_encoding import items_for_choice, type_code
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.plan_cache import FamilyCache
from kdacore_cuda.runtime.program import NOTHING, Clear, Launch, Program, Value

INPUTS = (*TOKENS, "A_log", "dt_bias", "cu_seqlens", "initial_state")
FIRST_ARRAYS = (*INPUTS, "d_o", "d_ht", "d_h0", "saved", "both", "first")
"""Arrays that the first launches take; ``both`` and ``first`` are buffers, ``saved`` is the forward's."""
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "d_A", "d_bias")
SECOND_ARRAYS = (*INPUTS, "d_o", "saved", "both", "second", "zeroed", *GRADIENTS, "dA_part", "dbias_part")
"""Arrays that the other launches take; ``second`` and ``zeroed`` are buffers. ``dA_part`` and ``dbias_part`` are given
only where sums over chunks are left to the caller."""


class BackwardLaunches(NamedTuple):
    """The launches of a backward in two groups."""

    first: Launches
    """With :data:`FIRST_ARRAYS`. The buffer ``first`` is free when they are queued, ``both`` when the others are."""
    second: Launches
    """With :data:`SECOND_ARRAYS`; they write the gradients."""


def launches_of(
    r: Request, wanted: InputGrads, saved: str = "", sums_to_caller: bool = False
) -> BackwardLaunches:
    """The launches of a backward, given contiguous arrays.

    Args:
        r: the call; kernels are given g as :func:`kdacore_cuda.forms.chunk_numbers.g_type` says.
        wanted: for each gradient whether a call returns it.
        saved: what is there of the forward's: :attr:`kdacore_cuda.choice.Choice.saves`.
        sums_to_caller: sums for gradients of A_log and dt_bias over chunks are left to the caller.
    """
    numbers, multiprocessors = chunk_numbers(r), multiprocessors_of(r)
    units, tokens, packed, blocks = numbers["units"], r.B * r.T, r.packed, numbers["value_blocks"]
    numbers["call_flags"] = numbers["flags"]
    scan, own, sizes = _scan_of(r, saved, units, multiprocessors)
    numbers |= own
    places, of_first, of_both = _places_in_unit(saved == "operands", blocks)
    numbers |= {name: units * at for name, at in places}
    first, both, second, zeroed = Buffer(units * of_first), Buffer(units * of_both), Buffer(), Buffer()
    in_saved = _in_saved(saved)
    for name, size in sizes.items():
        if name not in in_saved:
            numbers[f"{name}_at"] = first.add(size)
    if saved == "maps":
        numbers |= {
            "maps_at": 0,
            "starts_at": sizes["maps"],
        }  # as kdacore_cuda.forms.segments.launches saves them
    if not sums_to_caller:
        sums = zeroed if packed else both  # no kernel writes those of a pack's unused slots
        if wanted.A_log:
            numbers["dA_part_at"] = sums.add(4 * units)
        if wanted.dt_bias:
            numbers["dbias_part_at"] = sums.add(4 * units * SIZE)
    gates, grouped, A_type, row_bytes = _of_family(r)
    for x in _in_second(grouped, wanted):
        numbers[f"d{x}_at"] = second.add(tokens * row_bytes[x])
    rows = tokens * r.H
    numbers |= {
        "grads_blocks": min(units, multiprocessors),
        "group_blocks": -(-rows // (kernels.GROUPS_THREADS // 32)),
        "rows": rows,
        "slots": chunk_slots(r),
        "A_type": A_type,
        "zeroed_bytes": zeroed.bytes,
    }
    arch = arch_of(r)
    narrow = is_narrow(r)
    one = _first_program(numbers, *gates, saved, scan, narrow)
    in_segments = isinstance(scan, Walks)
    two = _second_program(
        numbers, *gates, grouped, wanted, saved, in_segments, sums_to_caller, packed, narrow
    )
    return BackwardLaunches(
        Launches(one, numbers, arch, {"both": both.bytes, "first": first.bytes}),
        Launches(two, numbers, arch, {"second": second.bytes, "zeroed": zeroed.bytes}),
    )


def _scan_of(
    r: Request, saved: str, units: int, multiprocessors: int
) -> tuple[int | Walks, dict[str, int], dict[str, int]]:
    """The scan: warpgroups of the kernel for whole sequences, or walks of segments; its numbers; bytes of the arrays
    that it needs beside the common workspace."""
    walked = kernel_request(r)  # with V > 128: each block of 128 values is a value head
    items, heads = walked.N * walked.HV, items_for_choice(walked)
    if saved == "operands":  # of the scan's blocks the reverse ones come first
        warpgroups = kernels.walk_warpgroups(heads, multiprocessors)
        return warpgroups, {"scan_blocks": 2 // warpgroups * items}, {}
    if saved == "maps" or chosen(r).backward_in_segments:
        walks, sizes, own = scan_in_segments(r, saved == "maps", multiprocessors)
        return walks, own | {"prepare_blocks": units}, sizes
    warpgroups = kernels.walk_warpgroups(2 * heads, multiprocessors)
    return warpgroups, {"prepare_blocks": units, "scan_blocks": 4 // warpgroups * items}, {}


def _numbers_of_family(r: Request) -> tuple[tuple[bool, bool], bool, int, dict[str, int]]:
    """What does not depend on lengths: whether g is float32 and the gate bounded; whether q and k have groups of value
    heads; the type of A_log; by array the bytes of a token of the gradient that the gradients kernel writes."""
    grouped = r.HV != r.H
    row_bytes = {}
    for x, width in (("q", r.K), ("k", r.K), ("v", r.V), ("g", r.K), ("beta", 1)):
        parts = grouped and x in ("q", "k")
        row_bytes[x] = r.HV * (4 * SIZE if parts else width * ITEM_SIZES[r.spec(x).dtype])
    return gates_of(r), grouped, type_code(r, "A_log"), row_bytes


_of_family = FamilyCache(_numbers_of_family)


@cache
def _in_second(grouped: bool, wanted: InputGrads) -> tuple[str, ...]:
    """The arrays whose gradients are yet to be summed (dq and dk of each value head, float32) or not wanted: the
    gradients kernel writes those to the buffer ``second``."""
    return tuple(x for x in TOKENS if (grouped and x in ("q", "k")) or not getattr(wanted, x))


def _in_saved(saved: str) -> tuple[str, ...]:
    """Arrays that the forward has saved, given which."""
    return {"operands": workspace.SAVED, "maps": ("maps", "starts")}.get(saved, ())


@cache
def _places_in_unit(
    operands_are_saved: bool, value_blocks: int
) -> tuple[tuple[tuple[str, int], ...], int, int]:
    """Where the arrays of the workspace lie if there is one unit, by the names of those numbers; bytes of a unit in
    the buffers ``first`` and ``both``. All are multiples of 256, so with more units each is as many times that."""
    places = workspace.saved_buffer(1, value_blocks)[0] if operands_are_saved else {}
    first, both = Buffer(), Buffer()
    for name, size in workspace.unit_bytes(value_blocks).items():
        if name not in places:
            places[name] = (both if name in _IN_BOTH else first).add(size)
    return tuple((f"{name}_at", at) for name, at in places.items()), first.bytes, both.bytes


_IN_BOTH = frozenset(WORKSPACE) - workspace.READ_BY_SCAN_ONLY
"""Arrays in the buffer ``both``, unless they were saved."""


def _place(name: str, saved: str) -> Value:
    """Where an array of the workspace lies."""
    buffer = "saved" if name in _in_saved(saved) else "both" if name in _IN_BOTH else "first"
    return buffer, f"{name}_at"


@made_once
def _first_program(
    numbers: Iterable[str], float_gate: bool, bounded: bool, saved: str, scan: int | Walks, narrow: bool
) -> Program:
    walks = scan if isinstance(scan, Walks) else None
    more = SEGMENTS_WORKSPACE if walks and walks.maps else ()
    fields: dict[str, Value] = {name: _place(name, saved) for name in (*WORKSPACE, *more)}
    fields["h0"] = "initial_state"
    made = (
        {} if saved == "operands" else {"prepare": kernels.prepare_kernel(float_gate, bounded, narrow=narrow)}
    )
    made |= (
        {"scan": kernels.scan_kernel(scan, narrow=narrow)} if isinstance(scan, int) else dict(scan.kernels())
    )
    steps = [Launch(name, kernel, f"{name}_blocks", fields) for name, kernel in made.items()]
    return Program(steps, FIRST_ARRAYS, tuple(numbers))


@made_once
def _second_program(
    numbers: Iterable[str],
    float_gate: bool,
    bounded: bool,
    grouped: bool,
    wanted: InputGrads,
    saved: str,
    in_segments: bool,
    sums_to_caller: bool,
    packed: bool,
    narrow: bool,
) -> Program:
    """``in_segments``: the call's numbers include the lengths of segments, which the kernels' parameters have."""
    parts: dict[str, Value] = {}
    sums: dict[str, Value] = {}
    for is_wanted, part, *results in (
        (wanted.A_log, "dA_part", "d_A", "A_type"),
        (wanted.dt_bias, "dbias_part", "d_bias", "bias_type"),
    ):
        if not is_wanted:
            parts[part] = NOTHING
            sums |= dict.fromkeys(results, NOTHING)
        else:
            parts[part] = part if sums_to_caller else ("zeroed" if packed else "both", f"{part}_at")
    has_sums = (wanted.A_log or wanted.dt_bias) and not sums_to_caller
    fields: dict[str, Value] = {name: _place(name, saved) for name in _IN_BOTH}
    fields |= {"h0": "initial_state"} | parts
    fields |= {f"d{x}": ("second", f"d{x}_at") for x in _in_second(grouped, wanted)}
    steps: list[Launch | Clear] = [Clear("zeroed", "zeroed_bytes")] if packed and has_sums else []
    grads = kernels.grads_kernel(float_gate, grouped, bounded, narrow)
    steps.append(Launch("grads", grads, "grads_blocks", fields))
    for x in ("q", "k") if grouped else ():
        if getattr(wanted, x):
            own: dict[str, Value] = {f"x_{axis}": f"{x}_{axis}" for axis in ("sb", "st", "sh")}
            own |= {"x": x, "part": fields[f"d{x}"], "out": f"d{x}", "flags": "call_flags"}
            steps.append(Launch(f"groups of {x}", kernels.groups_kernel(narrow), "group_blocks", own))
    if has_sums:
        steps.append(Launch("sums", kernels.sums_kernel(narrow), "HV", parts | sums))
    return Program(steps, SECOND_ARRAYS, tuple(numbers))
