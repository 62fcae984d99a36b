"""The launches of the backward of ``chunk_gated_delta_rule`` as data.

Everything is recomputed from the inputs, where the forward has saved nothing
(:mod:`kdacore_cuda.forms.gated_delta.workspace`): records of all chunks; then the walks, states forward and their
gradients in reverse, side by side in one grid; then grads (every input gradient of each chunk but that of v, which
the walk in reverse has written and grads reads), and sums over chunks. With few heads the walks are cut
(:mod:`kdacore_cuda.forms.gated_delta.backward_segments`). As dv is written that early, all launches are
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
from kdacore_cuda.forms.gated_delta.kernels import (
    Variant,
    backward_walk_kernel,
    grads_kernel,
    records_kernel,
    sums_kernel,
    variant_of,
)
from kdacore_cuda.forms.gated_delta.launches import call_numbers
from kdacore_cuda.forms.gated_delta.workspace import SAVED, UNIT_ARRAYS, places
from kdacore_cuda.forms.launches import TOKENS, Launches, made_once
from kdacore_cuda.kernel_parameters import ITEM_SIZES
from kdacore_cuda.request_encoding import type_code
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.program import NOTHING, Clear, Launch, Program, Value

ARRAYS = (
    *(*INPUTS, "d_o", "d_ht", "d_h0", "saved", "workspace", "second", "zeroed"),
    *(*GRADIENTS, "dA_part", "dbias_part"),
)
"""Arrays that the launches take. Buffers: ``workspace``; ``second``, gradients of tokens that are not wanted;
``zeroed``, parts of sums in a pack, whose unused slots no kernel writes. ``saved`` is the forward's. ``dA_part`` and
``dbias_part`` are given only where sums over chunks are left to the caller."""
_PARTS = {"dA_part": "A_log", "dbias_part": "dt_bias"}
"""Float32 ``[slots, HV]`` -> the argument whose gradient is the sum."""


def launches_of(r: Request, wanted: InputGrads, saved: str = "", sums_to_caller: bool = False) -> Launches:
    """The launches of a backward, given contiguous arrays.

    Args:
        r: the call; bfloat16 or float16 q, k and v, K and V up to 128, no pools.
        wanted: for each gradient whether a call returns it.
        saved: what is there of the forward's: :attr:`kdacore_cuda.choice.Choice.saves`.
        sums_to_caller: sums for gradients of A_log and dt_bias over chunks are left to the caller.
    """
    slots, items, multiprocessors = chunk_slots(r), r.N * r.HV, multiprocessors_of(r)
    numbers = call_numbers(r, for_backward=True)
    cut = None if saved else cut_of(r)
    of, walks = variant_of(r, cut is not None), items if saved else 2 * items
    warpgroups = min(walk_warpgroups(walks, multiprocessors), of.blocks())
    workspace, second, zeroed = Buffer(), Buffer(), Buffer()
    if saved:
        numbers |= places(SAVED, slots * r.HV, of.size, Buffer())
    own = tuple([name for name in UNIT_ARRAYS if not (saved and name in SAVED)])
    numbers |= places(own, slots * r.HV, of.size, workspace)
    parts = tuple([name for name, x in _PARTS.items() if getattr(wanted, x)])
    if not sums_to_caller:
        for name in parts:
            numbers[f"{name}_at"] = (zeroed if r.packed else workspace).add(4 * slots * r.HV)
    unwanted = tuple([x for x in TOKENS if not getattr(wanted, x)])
    for x in unwanted:
        numbers[f"d{x}_at"] = second.add(_gradient_bytes(r, x))
    numbers |= {
        "walk_blocks": of.blocks(warpgroups) * walks,
        "grads_blocks": min(slots * r.H, multiprocessors),
        "slots": slots,
        "A_type": type_code(r, "A_log"),
        "zeroed_bytes": zeroed.bytes,
    }
    if cut is not None:
        numbers |= numbers_of(r, cut, workspace)
    walk = (True, cut.chain) if cut else (False, warpgroups)
    program = _program(numbers, of, walk, bool(saved), unwanted, parts, sums_to_caller, r.packed)
    buffers = {"workspace": workspace.bytes, "second": second.bytes, "zeroed": zeroed.bytes}
    return Launches(program, numbers, arch_of(r), buffers)


def _gradient_bytes(r: Request, name: str) -> int:
    """Those of the gradient of an array of tokens."""
    heads, width = {"q": (r.H, r.K), "k": (r.H, r.K), "v": (r.HV, r.V)}.get(name, (r.HV, 1))
    return r.B * r.T * heads * width * ITEM_SIZES[r.spec(name).dtype]


@made_once
def _program(
    numbers: Iterable[str],
    of: Variant,
    walk: tuple[bool, int],
    saved: bool,
    unwanted: tuple[str, ...],
    parts: tuple[str, ...],
    sums_to_caller: bool,
    packed: bool,
) -> Program:
    """``walk``: whether walks are cut into segments, and then blocks a state of the chain, else warpgroups of a block.
    ``unwanted``: tokens whose gradients nobody takes; ``parts``: those of :data:`_PARTS` whose sums are wanted."""
    fields: dict[str, Value] = {
        name: ("saved" if saved and name in SAVED else "workspace", f"{name}_at") for name in UNIT_ARRAYS
    }
    fields |= {f"d{x}": ("second", f"d{x}_at") for x in unwanted}
    sums: dict[str, Value] = {name: NOTHING for name in _PARTS if name not in parts}
    for name in parts:
        sums[name] = name if sums_to_caller else ("zeroed" if packed else "workspace", f"{name}_at")
    fields |= {"h0": "initial_state", "ckpt_every": NOTHING, **sums}
    steps: list[Launch | Clear] = []
    if packed and parts and not sums_to_caller:
        steps.append(Clear("zeroed", "zeroed_bytes"))
    if not saved:
        records: dict[str, Value] = {"records": fields["records"]}
        steps.append(Launch("records", records_kernel(of), "record_blocks", records))
    cut, size = walk
    if cut:
        steps += steps_of(fields, of, size)
    else:
        steps.append(Launch("walks", backward_walk_kernel(size, not saved, of), "walk_blocks", fields))
    steps.append(Launch("grads", grads_kernel(of), "grads_blocks", fields))
    if parts and not sums_to_caller:
        absent: dict[str, Value] = {}
        if "dA_part" not in parts:
            absent |= {"d_A": NOTHING, "A_type": NOTHING}
        if "dbias_part" not in parts:
            absent |= {"d_bias": NOTHING, "bias_type": NOTHING}
        steps.append(Launch("sums", sums_kernel(), "HV", sums | absent))
    return Program(steps, ARRAYS, tuple(numbers))
