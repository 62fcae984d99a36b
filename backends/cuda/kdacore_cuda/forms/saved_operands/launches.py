"""The launches of the saved_operands form as data: prepare, and states with outputs. What they leave in the
backward's workspace is saved for it (:mod:`kdacore_cuda.forms.saved_operands.workspace`)."""

from __future__ import annotations

from functools import cache

from kdacore.types import Request
from kdacore_cuda.forms.backward.kernels import (
    prepare_kernel,
    scan_outputs_kernel,
    walk_warpgroups,
)
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, takes_float_gate
from kdacore_cuda.forms.launches import FORWARD_ARRAYS, Launches
from kdacore_cuda.forms.saved_operands.workspace import SAVED, saved_buffer
from kdacore_cuda.request_encoding import has_bounded_gate, items_for_choice
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_cuda.runtime.program import Launch, Program, Value


def launches_of(r: Request) -> Launches:
    """The launches of a call that this form serves."""
    numbers, multiprocessors = chunk_numbers(r), multiprocessors_of(r)
    units, items = int(numbers["units"]), r.N * r.HV
    warpgroups = walk_warpgroups(items_for_choice(r), multiprocessors)
    outputs = scan_outputs_kernel(warpgroups)
    places, size = saved_buffer(units)
    numbers |= {f"{name}_at": at for name, at in places.items()}
    numbers |= {"prepare_blocks": units, "output_blocks": 2 // warpgroups * items}
    prepare = prepare_kernel(takes_float_gate(r), has_bounded_gate(r))
    program = _program(prepare, outputs, tuple(numbers))
    return Launches(program, numbers, arch_of(r), {"saved": size})


@cache
def _program(prepare: Kernel, outputs: Kernel, numbers: tuple[str, ...]) -> Program:
    work: dict[str, Value] = {name: ("saved", f"{name}_at") for name in SAVED}
    work["h0"] = "initial_state"
    steps = (
        Launch("prepare", prepare, "prepare_blocks", work),
        Launch("outputs", outputs, "output_blocks", work | {"ht": "final_state"}),
    )
    return Program(steps, FORWARD_ARRAYS, numbers)
