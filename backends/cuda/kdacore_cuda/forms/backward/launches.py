"""The launches of the chunk backward on Hopper as data.

Everything is recomputed from the inputs, where the forward has saved nothing
(:mod:`kdacore_cuda.forms.saved_operands.workspace`, :mod:`kdacore_cuda.forms.segments.workspace`), in two groups, so
that memory of the first can become gradients. The first: prepare (operands of each chunk) and scan (states forward and
their gradients in reverse, side by side in one grid; with few heads in segments,
:mod:`kdacore_cuda.forms.backward.segments`). The second: grads (every input gradient of each chunk), and sums (over the
value heads of a group, and over chunks).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kdacore.types import InputGrads, Request
from kdacore_cuda.forms.backward.kernels import (
    GROUPS_THREADS,
    grads_kernel,
    groups_kernel,
    prepare_kernel,
    scan_kernel,
    sums_kernel,
    walk_warpgroups,
)
from kdacore_cuda.forms.backward.segments import scan_in_segments
from kdacore_cuda.forms.backward.workspace import READ_BY_SCAN_ONLY, UNIT_BYTES, WORKSPACE, Buffer
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, chunk_slots, takes_float_gate
from kdacore_cuda.forms.launches import TOKENS, Launches
from kdacore_cuda.forms.saved_operands.workspace import saved_buffer
from kdacore_cuda.forms.segments import workspace as saved_maps
from kdacore_cuda.kernel_parameters import ITEM_SIZES
from kdacore_cuda.request_encoding import has_bounded_gate, items_for_choice, type_code
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_cuda.runtime.program import NOTHING, Clear, Launch, Program, Value

INPUTS = (*TOKENS, "A_log", "dt_bias", "cu_seqlens", "initial_state")
FIRST_ARRAYS = (*INPUTS, "d_o", "d_ht", "d_h0", "saved", "both", "first")
"""Arrays that the first launches take; ``both`` and ``first`` are buffers, ``saved`` is the forward's."""
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "d_A", "d_bias")
SECOND_ARRAYS = (*INPUTS, "d_o", "saved", "both", "second", "zeroed", *GRADIENTS, "dA_part", "dbias_part")
"""Arrays that the other launches take; ``second`` and ``zeroed`` are buffers. ``dA_part`` and ``dbias_part`` are given
only where sums over chunks are left to the caller."""

Scan = tuple[tuple[str, Kernel], ...]
"""The launches between prepare and grads: names and kernels, in order."""


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
    units = int(numbers["units"])
    numbers["call_flags"] = numbers["flags"]
    scan, own, sizes = _scan_of(r, saved, numbers)
    numbers |= own
    first, both, second, zeroed = (Buffer() for _ in range(4))
    offsets: dict[str, int] = {}
    if saved == "operands":
        offsets |= saved_buffer(units)[0]
    elif saved == "maps":
        offsets |= saved_maps.saved_places(sizes["starts"] // saved_maps.START_BYTES)
    in_saved = frozenset(offsets)
    for name, size in UNIT_BYTES.items():
        if name not in in_saved:
            offsets[name] = (first if name in READ_BY_SCAN_ONLY else both).add(units * size)
    offsets |= {name: first.add(size) for name, size in sizes.items() if name not in in_saved}
    sums = zeroed if r.packed else both  # no kernel writes those of a pack's unused slots
    parts = tuple(
        name for name, is_wanted in (("dA_part", wanted.A_log), ("dbias_part", wanted.dt_bias)) if is_wanted
    )
    for name in parts if not sums_to_caller else ():
        offsets[name] = sums.add(units * 4 * (r.K if name == "dbias_part" else 1))
    grouped = r.HV != r.H
    in_second = _gradients_in_second(r, grouped, wanted)
    offsets |= {name: second.add(size) for name, size in in_second.items()}

    grads = grads_kernel(takes_float_gate(r), grouped, has_bounded_gate(r))
    rows = r.B * r.T * r.H
    numbers |= {f"{name}_at": at for name, at in offsets.items()} | {
        "grads_blocks": min(units, multiprocessors),
        "group_blocks": -(-rows // (GROUPS_THREADS // 32)),
        "rows": rows,
        "slots": chunk_slots(r),
        "A_type": type_code(r, "A_log"),
        "zeroed_bytes": zeroed.bytes,
    }
    names, arch = tuple(numbers), arch_of(r)
    work = frozenset(sizes)
    one = _first_program(scan, in_saved, work, names)
    two = _second_program(
        grads, grouped, wanted, in_saved, frozenset(in_second), parts, sums_to_caller, r.packed, names
    )
    return BackwardLaunches(
        Launches(one, numbers, arch, {"both": both.bytes, "first": first.bytes}),
        Launches(two, numbers, arch, {"second": second.bytes, "zeroed": zeroed.bytes}),
    )


def _scan_of(
    r: Request, saved: str, numbers: dict[str, float]
) -> tuple[Scan, dict[str, float], dict[str, int]]:
    """What is launched before the gradients; its numbers; bytes of the arrays that it needs beside the common
    workspace."""
    items, heads, multiprocessors = r.N * r.HV, items_for_choice(r), multiprocessors_of(r)
    if saved == "operands":  # of the scan's blocks the reverse ones come first
        warpgroups = walk_warpgroups(heads, multiprocessors)
        return (("scan", scan_kernel(warpgroups)),), {"scan_blocks": 2 // warpgroups * items}, {}
    prepare = prepare_kernel(takes_float_gate(r), has_bounded_gate(r))
    own: dict[str, float] = {"prepare_blocks": numbers["units"]}
    if saved == "maps" or chosen(r).backward_in_segments:
        launches, sizes, more = scan_in_segments(r, saved == "maps")
        return (("prepare", prepare), *launches), own | more, sizes
    warpgroups = walk_warpgroups(2 * heads, multiprocessors)
    own["scan_blocks"] = 4 // warpgroups * items
    return (("prepare", prepare), ("scan", scan_kernel(warpgroups))), own, {}


def _gradients_in_second(r: Request, grouped: bool, wanted: InputGrads) -> dict[str, int]:
    """The gradients that are yet to be summed (dq and dk of each value head, float32) or not wanted, with bytes: the
    gradients kernel writes them to the buffer ``second``."""
    found = {}
    for x, width in (("q", r.K), ("k", r.K), ("v", r.V), ("g", r.K), ("beta", 1)):
        summed = grouped and x in ("q", "k")
        if summed or not getattr(wanted, x):
            size = 4 if summed else ITEM_SIZES[r.spec(x).dtype]
            found[f"d{x}"] = r.B * r.T * r.HV * width * size
    return found


def _place(name: str, in_saved: frozenset[str]) -> Value:
    """Where an array of the workspace lies."""
    buffer = (
        "saved"
        if name in in_saved
        else "both"
        if name in WORKSPACE and name not in READ_BY_SCAN_ONLY
        else "first"
    )
    return buffer, f"{name}_at"


@cache
def _first_program(
    scan: Scan, in_saved: frozenset[str], more: frozenset[str], numbers: tuple[str, ...]
) -> Program:
    """``more``: arrays that the scan needs beside the common workspace."""
    fields: dict[str, Value] = {name: _place(name, in_saved) for name in (*WORKSPACE, *sorted(more))}
    fields["h0"] = "initial_state"
    steps = [Launch(name, kernel, f"{name}_blocks", fields) for name, kernel in scan]
    return Program(steps, FIRST_ARRAYS, numbers)


@cache
def _second_program(
    grads: Kernel,
    grouped: bool,
    wanted: InputGrads,
    in_saved: frozenset[str],
    in_second: frozenset[str],
    parts: tuple[str, ...],
    sums_to_caller: bool,
    packed: bool,
    numbers: tuple[str, ...],
) -> Program:
    left = [name for name in WORKSPACE if name not in READ_BY_SCAN_ONLY]
    fields: dict[str, Value] = {name: _place(name, in_saved) for name in left}
    fields |= {name: ("second", f"{name}_at") for name in in_second}
    at: dict[str, Value] = {
        name: name if sums_to_caller else ("zeroed" if packed else "both", f"{name}_at") for name in parts
    }
    absent: dict[str, Value] = {name: NOTHING for name in ("dA_part", "dbias_part") if name not in parts}
    steps: list[Launch | Clear] = []
    if packed and parts and not sums_to_caller:
        steps.append(Clear("zeroed", "zeroed_bytes"))
    steps.append(Launch("grads", grads, "grads_blocks", {"h0": "initial_state", **fields, **at, **absent}))
    for x in ("q", "k") if grouped else ():
        if getattr(wanted, x):
            own: dict[str, Value] = {f"x_{axis}": f"{x}_{axis}" for axis in ("sb", "st", "sh")}
            own |= {"x": x, "part": fields[f"d{x}"], "out": f"d{x}", "flags": "call_flags"}
            steps.append(Launch(f"groups of {x}", groups_kernel(), "group_blocks", own))
    if parts and not sums_to_caller:
        sums: dict[str, Value] = {**at, **absent}
        if "dA_part" not in parts:
            sums |= {"d_A": NOTHING, "A_type": NOTHING}
        if "dbias_part" not in parts:
            sums |= {"d_bias": NOTHING, "bias_type": NOTHING}
        steps.append(Launch("sums", sums_kernel(), "HV", sums))
    return Program(steps, SECOND_ARRAYS, numbers)
