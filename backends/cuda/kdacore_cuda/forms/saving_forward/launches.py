"""The launches of the saving_forward form as data: prepare, and states with outputs. What they leave in the
backward's workspace is saved for it (:mod:`kdacore_cuda.forms.backward.workspace`)."""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.types import Request
from kdacore_cuda.fitted_head_dims import kernel_request
from kdacore_cuda.forms.backward import kernels
from kdacore_cuda.forms.backward.workspace import SAVED, saved_buffer
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, gates_of
from kdacore_cuda.forms.launches import FORWARD_ARRAYS, Launches, made_once
from kdacore_cuda.forms.own_head_dims import is_narrow
from kdacore_cuda.request_encoding import items_for_choice
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.program import Launch, Program, Value


def launches_of(r: Request) -> Launches:
    """The launches of a call that this form serves."""
    numbers, walked = (
        chunk_numbers(r),
        kernel_request(r),
    )  # with V > 128: each block of 128 values is a value head
    units, items = numbers["units"], items_for_choice(walked)
    warpgroups = kernels.walk_warpgroups(items, multiprocessors_of(r))
    places, size = saved_buffer(units, numbers["value_blocks"])
    numbers |= {f"{name}_at": at for name, at in places.items()}
    numbers |= {"prepare_blocks": units, "output_blocks": 2 // warpgroups * walked.N * walked.HV}
    program = _program(numbers, *gates_of(r), warpgroups, is_narrow(r))
    return Launches(program, numbers, arch_of(r), {"saved": size})


@made_once
def _program(
    numbers: Iterable[str], float_gate: bool, bounded: bool, warpgroups: int, narrow: bool
) -> Program:
    work: dict[str, Value] = {name: ("saved", f"{name}_at") for name in SAVED}
    work["h0"] = "initial_state"
    prepare = kernels.prepare_kernel(float_gate, bounded, narrow=narrow)
    outputs = kernels.scan_outputs_kernel(warpgroups, narrow)
    steps = (
        Launch("prepare", prepare, "prepare_blocks", work),
        Launch("outputs", outputs, "output_blocks", work | {"ht": "final_state"}),
    )
    return Program(steps, FORWARD_ARRAYS, tuple(numbers))
