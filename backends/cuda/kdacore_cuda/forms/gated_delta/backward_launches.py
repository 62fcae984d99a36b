"""The launches of the backward of ``chunk_gated_delta_rule`` as data.

Everything is recomputed from the inputs, where the forward has saved nothing
(:mod:`kdacore_cuda.forms.gated_delta.workspace`): records of all chunks; then the walks, states forward and their
gradients in reverse, side by side in one grid; then the launches of
:mod:`kdacore_cuda.forms.gated_delta.gradient_launches`. With few heads the walks are cut
(:mod:`kdacore_cuda.forms.gated_delta.backward_segments`). As dv is written by a walk, all launches are
one group, and memory of all gradients is taken before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.types import InputGrads, Request
from kdacore_cuda.forms.backward.kernels import walk_warpgroups
from kdacore_cuda.forms.backward.launches import GRADIENTS, INPUTS
from kdacore_cuda.forms.backward.workspace import Buffer
from kdacore_cuda.forms.chunk_numbers import chunk_slots
from kdacore_cuda.forms.gated_delta.backward_segments import cut_of, numbers_of, steps_of
from kdacore_cuda.forms.gated_delta.gradient_launches import GradientLaunches
from kdacore_cuda.forms.gated_delta.kernels import (
    backward_walk_kernel,
    records_kernel,
)
from kdacore_cuda.forms.gated_delta.launches import call_numbers
from kdacore_cuda.forms.gated_delta.workspace import SAVED, UNIT_ARRAYS, places
from kdacore_cuda.forms.launches import Launches, made_once
from kdacore_cuda.gated_delta_variant import Variant, variant_of
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.program import NOTHING, Clear, Launch, Program, Value

ARRAYS = (
    *(*INPUTS, "d_o", "d_ht", "d_h0", "saved", "workspace", "second", "zeroed"),
    *(*GRADIENTS, "dA_part", "dbias_part"),
)
"""Arrays that the launches take. Buffers: ``workspace``; ``second``, gradients of tokens that are not wanted;
``zeroed``, parts of sums in a pack, whose unused slots no kernel writes. ``saved`` is the forward's. ``dA_part`` and
``dbias_part`` are given only where sums over chunks are left to the caller."""


def launches_of(r: Request, wanted: InputGrads, saved: str = "", sums_to_caller: bool = False) -> Launches:
    """The launches of a backward, given contiguous arrays.

    Args:
        r: the call; bfloat16 or float16 q, k and v, K and V up to 128, no pools.
        wanted: for each gradient whether a call returns it.
        saved: what is there of the forward's: :attr:`kdacore_cuda.choice.Choice.saves`.
        sums_to_caller: sums for gradients of A_log and dt_bias over chunks are left to the caller.
    """
    units, items = chunk_slots(r) * r.HV, r.N * r.HV
    numbers, workspace = call_numbers(r, for_backward=True), Buffer()
    cut = None if saved else cut_of(r)
    of, walks = variant_of(r, cut is not None), items if saved else 2 * items
    warpgroups = min(walk_warpgroups(walks, multiprocessors_of(r)), of.blocks())
    if saved:
        numbers |= places(SAVED, units, of.size, Buffer())
    arrays = tuple([x for x in UNIT_ARRAYS if not (saved and x in SAVED)])
    numbers |= places(arrays, units, of.size, workspace)
    gradients = GradientLaunches.of(r, wanted, sums_to_caller)
    own, buffers = gradients.numbers(r, workspace)
    numbers |= {**own, "walk_blocks": of.blocks(warpgroups) * walks}
    if cut is not None:
        numbers |= numbers_of(r, cut, workspace)
    walk = (True, cut.chain) if cut else (False, warpgroups)
    program = _program(numbers, of, walk, bool(saved), gradients)
    return Launches(program, numbers, arch_of(r), {"workspace": workspace.bytes, **buffers})


@made_once
def _program(
    numbers: Iterable[str], of: Variant, walk: tuple[bool, int], saved: bool, gradients: GradientLaunches
) -> Program:
    """``walk``: whether walks are cut into segments, and then blocks a state of the chain, else warpgroups of a
    block."""
    fields: dict[str, Value] = {
        name: ("saved" if saved and name in SAVED else "workspace", f"{name}_at") for name in UNIT_ARRAYS
    }
    fields |= {"h0": "initial_state", "ckpt_every": NOTHING, **gradients.fields()}
    steps: list[Launch | Clear] = [*gradients.cleared()]
    if not saved:
        records: dict[str, Value] = {"records": fields["records"]}
        steps.append(Launch("records", records_kernel(of), "record_blocks", records))
    cut, size = walk
    if cut:
        steps += steps_of(fields, of, size)
    else:
        steps.append(Launch("walks", backward_walk_kernel(size, not saved, of), "walk_blocks", fields))
    return Program([*steps, *gradients.steps(fields, of)], ARRAYS, tuple(numbers))
