"""Calls of chunk ops by a form that a test names, whatever form would be chosen, whole or launch by launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.forms.dataflow import launches as dataflow_launches
from kdacore_cuda.forms.fused import launches as fused_launches
from kdacore_cuda.forms.gated_delta import launches as gated_delta_launches
from kdacore_cuda.forms.launches import FORWARD_ARGUMENTS, Launches
from kdacore_cuda.forms.segments import launches as segments_launches
from kdacore_cuda.forms.torch_forward import TorchOp, readable
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.program import Launch


def _op(launches_of: Callable[[Request], Launches], takes_rows: bool) -> TorchOp:
    return TorchOp(
        lambda request, plain: launches_of(request),
        FORWARD_ARGUMENTS,
        ChunkInputs._fields,
        lambda request: takes_rows,
    )


_LAUNCHES = {
    "dataflow": dataflow_launches.launches_of,
    "fused": fused_launches.launches_of,
    "gated_delta": gated_delta_launches.launches_of,
    "segments": segments_launches.launches_of,
}
_OPS = {form: _op(launches_of, form != "dataflow") for form, launches_of in _LAUNCHES.items()}
dataflow_forward, fused_forward, segments_forward = (
    _OPS[form].forward for form in ("dataflow", "fused", "segments")
)


def launches_of(form: str, request: Request) -> Launches:
    """The launches of a form."""
    return _LAUNCHES[form](request)


class FormCall:
    """A call whose launches a test makes one by one, with results and buffers of its own."""

    def __init__(self, form: str, request: Request, inputs: ChunkInputs) -> None:
        r, v = request, inputs.v
        given, layout = readable(_OPS[form], r, inputs)
        self.made = launches_of(form, r)
        self.numbers = self.made.with_layout(layout)
        buffers = {
            name: v.new_empty(size, dtype=torch.uint8) for name, size in self.made.buffers.items() if size
        }
        self.workspace = buffers.get("workspace")
        self.segments = buffers.get("saved", self.workspace)
        """Where maps and starting states of segments lie."""
        dtype = getattr(torch, r.state_dtype)
        final = v.new_empty(r.state_shape, dtype=dtype) if r.output_final_state else None
        checkpoints = None
        if r.checkpoint_every:
            make = v.new_zeros if r.packed or r.pool_size else v.new_empty
            checkpoints = make(r.checkpoint_shape, dtype=dtype)
        self.outputs = Outputs(v.new_empty((r.B, r.T, r.HV, r.V)), final, checkpoints)
        results = dict(zip(("o", "final_state", "checkpoints"), self.outputs, strict=False))
        self._arrays: dict[str, Any] = given._asdict() | buffers | results

    @property
    def names(self) -> list[str]:
        """Of the launches, in order."""
        return [step.name for step in self._steps]

    @property
    def _steps(self) -> list[Launch]:
        return [step for step in self.made.program.steps if isinstance(step, Launch)]

    def blocks(self, name: str) -> int:
        """Of a launch."""
        (grid,) = (step.grid for step in self._steps if step.name == name)
        return int(self.numbers[grid])

    def launch(self, *names: str) -> None:
        """Make these launches, in their order; the others have no blocks."""
        idle = {step.grid: 0 for step in self._steps if step.name not in names}
        packed = self.made.program.pack_numbers(self.numbers | idle)
        torch_launch.run(self.made.program, packed, self.made.arch, self.outputs.o, self._arrays)


def grid_of(request: Request) -> int:
    """Blocks of the fused form's launch."""
    return int(fused_launches.launches_of(request).numbers["blocks"])


def workspace_bytes(request: Request) -> int:
    """Of the fused form."""
    return fused_launches.launches_of(request).buffers["workspace"]
