"""The backward of a chunk op on a slice of a row that continues on other ranks, on torch tensors. Buffers of the
launches before the ranks' exchange are used again by those after it. Nothing is read back from the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda.forms.backward.launches import GRADIENTS
from kdacore_cuda.forms.slices.by_op import backward_launches
from kdacore_cuda.forms.slices.forward import Pending
from kdacore_cuda.forms.slices.halves import GIVEN, BackwardSliceLaunches
from kdacore_cuda.forms.torch_gradients import narrowed
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import aligned, aligned_bytes, contiguous


def _make(r: Request, saved: bool = False) -> BackwardSliceLaunches:
    wanted = InputGrads(*[r.has(name) for name in InputGrads._fields])
    return backward_launches(r, wanted, saved)


_launches = {False: PlanCache(_make), True: PlanCache(partial(_make, saved=True))}
"""By whether the forward's maps and states of segments are there."""


def backward_begin(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Any, ...],
    grads: OutputGrads,
    starts: torch.Tensor,
    entering: torch.Tensor | None,
) -> tuple[torch.Tensor, Pending]:
    """The gradient of the state at the slice's start, of the sequence that its first token belongs to.

    Args:
        request: bfloat16 q, k and v, K = V = 128; as :class:`kdacore.types.SliceFunctions` says.
        inputs: its arrays.
        saved: the maps and states of segments that
            :func:`kdacore_cuda.forms.slices.forward.finish` saves, or nothing: then they are computed again.
        grads: those of ``o`` and, for sequences that end here, of ``final_state``; zero for others.
        starts: ``[N, HV, 128, 128]`` float32, K first: the state each sequence's local part starts
            from.
        entering: not used: it is the sequence that has the first token.

    Returns:
        ``[G, HV, 128, 128]`` float32, zero where the first token is padding; what
        :func:`backward_finish` takes.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    made, like = _launches[bool(saved)](request), inputs.v
    pending = Pending.of(request, inputs, made.begin)
    pending.arrays.update(
        d_o=like.new_zeros(like.shape) if grads.o is None else aligned(grads.o.contiguous()),
        starts=starts.contiguous(),
        saved=aligned_bytes(saved[0]) if saved else None,
    )
    result = starts.new_empty((made.results, request.HV, 128, 128))
    pending.run(made.begin, like, d_final=contiguous(grads.final_state), d_slice_start=result)
    return result, pending


def backward_finish(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Any, ...],
    pending: Pending,
    grads: OutputGrads,
    starts: torch.Tensor,
    ends: torch.Tensor,
) -> InputGrads:
    """The gradients of the slice's inputs.

    Args:
        request: as of :func:`backward_begin`.
        inputs: as of :func:`backward_begin`.
        saved: as of that function.
        pending: what that function left. Its workspace is freed here.
        grads: not used: ``pending`` has what is needed.
        starts: not used, likewise.
        ends: ``[N, HV, 128, 128]`` float32, K first: the gradient of the state that each sequence's
            local part ends in.

    Returns:
        Gradients with the shape and dtype of their inputs, None where the input is None; that of
        ``starts`` as ``initial_state``.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    made, like, left = _launches[bool(saved)](request), inputs.v, pending
    flows = {"ends": ends.contiguous(), "d_starts": ends.new_empty(ends.shape)}
    if made.scan is not None:
        pending.run(made.scan, like, **flows)
        left = Pending({name: pending.arrays[name] for name in (*GIVEN, "d_o", "both")}, pending.layout)
        pending.arrays.clear()  # the launches behind the scan read nothing else of it
    found = {
        name: None if (x := left.arrays[argument]) is None else x.new_empty(x.shape)
        for name, argument in zip(GRADIENTS, GIVEN, strict=False)
    }
    left.run(made.gradients, like, **torch_launch.new_buffers(like, made.gradients.buffers), **found, **flows)
    left.arrays.clear()
    of_tokens = dict(zip(InputGrads._fields, found.values(), strict=False))
    of_tokens["g"] = narrowed(of_tokens["g"], inputs.g.dtype)
    return InputGrads(**of_tokens, initial_state=flows["d_starts"])
