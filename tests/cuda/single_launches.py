"""Single kernels of the chunk forward and backward, launched with the arrays that a test gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, Request
from kdacore_cuda.architectures import HOPPER
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.backward.workspace import WORKSPACE as WORKSPACE
from kdacore_cuda.forms.chunk_forward import CHUNK
from kdacore_cuda.forms.chunk_numbers import chunk_numbers, chunk_slots, takes_float_gate
from kdacore_cuda.forms.launches import STRIDES
from kdacore_cuda.forms.torch_forward import readable
from kdacore_cuda.request_encoding import has_bounded_gate
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_cuda.runtime.program import Launch, Program

Arrays = dict[str, torch.Tensor]


class Plan(NamedTuple):
    """What launches take of a request."""

    request: Request
    numbers: dict[str, Any]
    slots: int
    float_gate: bool
    bounded: bool

    @property
    def grouped(self) -> bool:
        return self.request.HV != self.request.H

    def with_numbers(self, **more: Any) -> Plan:
        return self._replace(numbers=self.numbers | more)


def plan_of(r: Request) -> Plan:
    return Plan(r, chunk_numbers(r), chunk_slots(r), takes_float_gate(r), has_bounded_gate(r))


def make_workspace(plan: Plan, like: torch.Tensor, *names: str) -> Arrays:
    """Uninitialised arrays of the backward's workspace ``[slots, HV, elements]``."""
    lead = plan.slots, plan.request.HV
    return {
        name: like.new_empty((*lead, WORKSPACE[name][0]), dtype=getattr(torch, WORKSPACE[name][1]))
        for name in names
    }


def blocks_of(kernel: Kernel, units: int, r: Request) -> int:
    """Blocks of a kernel of the whole backward, as a call launches it."""
    macros = kernel.source.macros
    return {
        "prepare": lambda: units,
        "scan": lambda: 4 // macros["WARPGROUPS"] * r.N * r.HV,
        "grads": lambda: min(units, multiprocessors_of(r)),
    }[kernel.source.entry]()


def launch(
    kernel: Kernel, plan: Plan, inputs: ChunkInputs, arrays: Arrays, blocks: int | None = None
) -> None:
    """One launch. ``arrays``: the workspace, outputs and gradients by field; other fields are 0."""
    r = plan.request
    given, layout = readable(CHUNK, r, inputs, rows_apart=False)
    if blocks is None:
        blocks = blocks_of(kernel, plan.numbers["units"], r)
    strides = {} if layout is None else dict(zip(STRIDES, layout.strides, strict=True))
    numbers = plan.numbers | strides | {"blocks": blocks}
    named = {
        name: getattr(given, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
    }
    named |= {"h0": given.initial_state, **arrays}
    names = [name for name, kind in kernel.params.fields if kind == "ptr"]
    program = Program([Launch("one", kernel, "blocks")], names, tuple(numbers), one_segment=True)
    arch = (
        arch_of(r) if inputs.q.device.type == "cpu" else HOPPER
    )  # where the request's arrays may not have been
    torch_launch.run(program, program.pack_numbers(numbers), arch, inputs.q, named)


class InSegments(NamedTuple):
    """The backward's scan in segments."""

    launches: list[tuple[str, Kernel, int]]
    """Name, kernel and blocks of each."""
    sizes: dict[str, Any]
    """The numbers that say how sequences are cut, and flags."""
    bytes_of: dict[str, int]

    @property
    def stored_segments(self) -> int:
        """Times value heads; 0 if no sequence can have more than one."""
        return self.bytes_of.get("starts", 0) // (4 * 128 * 128)

    def workspace(self, like: torch.Tensor, HV: int) -> Arrays:
        """Uninitialised arrays ``[segments, HV, elements]``."""
        forms = chunk_backward_segments.WORKSPACE if self.stored_segments else {}
        return {
            name: like.new_empty((self.stored_segments // HV, HV, size), dtype=getattr(torch, dtype))
            for name, (size, dtype) in forms.items()
        }


def in_segments(r: Request, saved: bool = False) -> InSegments:
    walks, bytes_of, numbers = chunk_backward_segments.scan_in_segments(r, saved, multiprocessors_of(r))
    named = [(name, kernel, numbers.pop(f"{name}_blocks")) for name, kernel in walks.kernels()]
    return InSegments(named, numbers, bytes_of)


def launch_kernel(kernel: Kernel, grid: int, like: torch.Tensor, arrays: Arrays, **numbers: float) -> None:
    """One launch of any kernel: ``arrays`` and ``numbers`` are by field."""
    program = Program([Launch("one", kernel, "blocks")], tuple(arrays), ("blocks", *numbers))
    packed = program.pack_numbers({"blocks": grid, **numbers})
    torch_launch.run(program, packed, "sm_90a", like, arrays)
