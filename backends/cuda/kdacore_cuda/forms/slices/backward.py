"""The backward of ``chunk_kda`` on a slice of a row that continues on other ranks, on torch tensors. Buffers of the
launches before the ranks' exchange are used again by those after it. Nothing is read back from the device."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda.forms.backward.gradients import narrowed
from kdacore_cuda.forms.backward.launches import GRADIENTS
from kdacore_cuda.forms.chunk_forward import CHUNK
from kdacore_cuda.forms.launches import Layout
from kdacore_cuda.forms.slices.forward import run
from kdacore_cuda.forms.slices.launches import GIVEN, BackwardSliceLaunches, backward_launches
from kdacore_cuda.forms.torch_forward import readable
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import aligned, aligned_bytes


def _make(r: Request, saved: bool = False) -> BackwardSliceLaunches:
    wanted = InputGrads(*[r.has(name) for name in InputGrads._fields])
    return backward_launches(r, wanted, saved)


_launches = {False: PlanCache(_make), True: PlanCache(partial(_make, saved=True))}
"""By whether the forward's maps and states of segments are there."""


class Pending(NamedTuple):
    """What ``backward_finish`` needs of ``backward_begin``."""

    arrays: dict[str, Any]
    """Arguments as kernels read them, ``d_o``, and the buffers."""
    layout: Layout | None


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
    made = _launches[bool(saved)](request)
    given, layout = readable(CHUNK, request, inputs, rows_apart=False)
    like = inputs.v
    arrays = {name: getattr(given, name) for name in GIVEN} | {
        name: like.new_empty(size, dtype=torch.uint8) for name, size in made.begin.buffers.items()
    }
    arrays["d_o"] = like.new_zeros(like.shape) if grads.o is None else aligned(grads.o.contiguous())
    arrays["starts"] = starts.contiguous()
    arrays["saved"] = aligned_bytes(saved[0]) if saved else None
    result = starts.new_empty((made.results, request.HV, 128, 128))
    flows = {
        "d_final": None if grads.final_state is None else grads.final_state.contiguous(),
        "d_slice_start": result,
    }
    run(made.begin, layout, like, arrays | flows)
    return result, Pending(arrays, layout)


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
    made, like, (arrays, layout) = _launches[bool(saved)](request), inputs.v, pending
    ends = ends.contiguous()
    d_start = ends.new_empty(ends.shape)
    run(made.scan, layout, like, arrays | {"ends": ends, "d_starts": d_start})
    left = {name: arrays[name] for name in (*GIVEN, "d_o", "both")}
    arrays.clear()  # the launches behind the scan read nothing else of it
    buffers = {
        name: like.new_empty(size, dtype=torch.uint8) for name, size in made.gradients.buffers.items() if size
    }
    of = dict(zip(GRADIENTS, (*GIVEN[:5], "A_log", "dt_bias"), strict=True))
    found = {
        name: None if (x := left[argument]) is None else x.new_empty(x.shape) for name, argument in of.items()
    }
    run(made.gradients, layout, like, left | buffers | found)
    of_tokens = dict(zip(InputGrads._fields, found.values(), strict=False))
    of_tokens["g"] = narrowed(of_tokens["g"], inputs.g.dtype)
    return InputGrads(**of_tokens, initial_state=d_start)
