"""The launches of ``chunk_gated_delta_rule`` as data: records of all chunks, and a walk over each sequence and value
head, one after the other or side by side, or what :mod:`kdacore_cuda.forms.gated_delta.segments` puts in the walk's
place. Side by side the walk takes each record as soon as flags in the workspace say that it is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdacore.types import Request
from kdacore_cuda.choice import walk_warpgroups
from kdacore_cuda.forms.backward.workspace import Buffer
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, chunk_slots
from kdacore_cuda.forms.gated_delta.kernels import (
    records_beside_kernel,
    records_blocks,
    records_blocks_beside,
    records_kernel,
    to_checkpoints_kernel,
    walk_beside_kernel,
    walk_kernel,
)
from kdacore_cuda.forms.gated_delta.segments import cut_of, numbers_of, steps_of
from kdacore_cuda.forms.gated_delta.workspace import RECORD_FLAGS_BYTES, SAVED, places
from kdacore_cuda.forms.launches import FORWARD_ARRAYS, Launches, arguments_of, made_once
from kdacore_cuda.gated_delta_variant import Variant, variant_of
from kdacore_cuda.kernel_parameters import FLAGS, GATED_DELTA, GATED_DELTA_BESIDE
from kdacore_cuda.request_encoding import division, type_code
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.program import LAUNCH, Launch, Program, Value


def launches_of(r: Request) -> Launches:
    """The launches of a call; bfloat16 or float16 q, k and v, K and V up to 128. What it saves for the backward is the
    buffer ``saved``."""
    choice = chosen(r)
    if choice.records != "before":
        return _launches_side_by_side(r)
    saves, cut = bool(choice.saves), cut_of(r)
    items, of = r.N * r.HV, variant_of(r, cut is not None)
    warpgroups = min(walk_warpgroups(r, multiprocessors_of(r)), of.blocks())
    numbers = call_numbers(r, for_backward=saves) | {"walk_blocks": of.blocks(warpgroups) * items}
    buffer = Buffer()
    numbers |= places(SAVED if saves else ("records",), chunk_slots(r) * r.HV, of.size, buffer)
    if cut is not None:
        numbers |= numbers_of(r, cut, buffer)
    numbers |= _checkpoint_numbers(r, of, buffer)
    program = _program(numbers, of, warpgroups, saves, cut is not None, cut.chain if cut else 0)
    return Launches(program, numbers, arch_of(r), {"saved" if saves else "workspace": buffer.bytes})


def _launches_side_by_side(r: Request) -> Launches:
    """Those of a call whose records are made while others are walked
    (:func:`kdacore_cuda.choice.use_records_beside`)."""
    slots, of, buffer, multiprocessors = (
        chunk_slots(r),
        variant_of(r, cut=False),
        Buffer(),
        multiprocessors_of(r),
    )
    walking = of.blocks() * r.N * r.HV
    numbers = call_numbers(r, for_backward=False) | places(("records",), slots * r.HV, of.size, buffer)
    numbers["flags_at"] = buffer.add(slots * r.HV * RECORD_FLAGS_BYTES)
    beside = records_blocks_beside(slots * r.H, walking, multiprocessors)
    numbers |= {"record_blocks": beside, "walk_blocks": walking}
    numbers |= _checkpoint_numbers(r, of, buffer)
    program = _program_side_by_side(numbers, of)
    return Launches(program, numbers, arch_of(r), {"workspace": buffer.bytes})


def _checkpoint_numbers(r: Request, of: Variant, buffer: Buffer) -> dict[str, int]:
    """Those of checkpoints at chosen tokens. Adds the states at the starts of their chunks to a buffer."""
    if not of.marks:
        return {}
    matrices = r.checkpoint_count * r.HV
    return {
        "mark_states_at": buffer.add(matrices * 4 * of.size**2),
        "checkpoint_blocks": of.blocks() * matrices,
    }


def _checkpoint_states(of: Variant) -> dict[str, Value]:
    return {"mark_states": ("workspace", "mark_states_at")} if of.marks else {}


def call_numbers(r: Request, for_backward: bool) -> dict[str, Any]:
    """The numbers that the forward's and the backward's launches take.

    Args:
        r: the call.
        for_backward: gradients are divided by beta, so it may not be 0.
    """
    slots = chunk_slots(r)
    numbers = chunk_numbers(r) | {
        "K": r.K,
        "V": r.V,
        "g_type": type_code(r, "g"),
        "units": slots * r.H,
        "record_blocks": records_blocks(slots * r.H, multiprocessors_of(r)),
    }
    if for_backward:
        numbers["flags"] |= FLAGS["NONZERO_BETA"]
    for name, divisor in (("h", r.H), ("group", r.HV // r.H)):
        numbers[f"{name}_factor"], numbers[f"{name}_shift"] = division(divisor)
    return numbers


@made_once
def _program(
    numbers: Iterable[str], of: Variant, warpgroups: int, saves: bool, cut: bool, chain: int
) -> Program:
    """``cut``: sequences have several segments. ``chain``: blocks a state of the launch that chains them, 0 without."""
    buffer = "saved" if saves else "workspace"
    records: dict[str, Value] = arguments_of(GATED_DELTA) | {"records": (buffer, "records_at")}
    records |= _checkpoint_states(of)
    kept: dict[str, Value] = {name: (buffer, f"{name}_at") for name in SAVED} if saves else {}
    steps = [Launch("records", records_kernel(of), "record_blocks", records)]
    if cut:
        steps += steps_of(records, of, chain)
    else:
        steps.append(Launch("walk", walk_kernel(warpgroups, saves, of), "walk_blocks", records | kept))
    if of.marks:
        steps.append(Launch("checkpoints", to_checkpoints_kernel(of), "checkpoint_blocks", records))
    return Program(steps, FORWARD_ARRAYS, tuple(numbers))


@made_once
def _program_side_by_side(numbers: Iterable[str], of: Variant) -> Program:
    fields: dict[str, Value] = arguments_of(GATED_DELTA_BESIDE) | {
        "records": ("workspace", "records_at"),
        "ready": ("workspace", "flags_at"),
        "launch": LAUNCH,
    }
    fields |= _checkpoint_states(of)
    steps = [
        Launch("records", records_beside_kernel(of), "record_blocks", fields),
        Launch("walk", walk_beside_kernel(of), "walk_blocks", fields),
    ]
    if of.marks:
        own = {name: x for name, x in fields.items() if name in GATED_DELTA.offsets}
        steps.append(Launch("checkpoints", to_checkpoints_kernel(of), "checkpoint_blocks", own))
    return Program(steps, FORWARD_ARRAYS, tuple(numbers))
