"""Host side of the backward of ``chunk_kda`` on a slice of a row that continues on other ranks, on
Hopper: the backward in segments (:mod:`kdacore_cuda.forms.backward.segments`), cut where ranks exchange
gradients of states.

Before the exchange: prepare (operands of every chunk), maps (how each segment changes the state and
its gradient), slice gradient (the gradient of the state at the slice's start, as far as it comes from
here). After it: chain (the state at each segment's start, its gradient at each end), scan, grads and
sums. What prepare and maps compute is kept in between. Where the forward kept its maps and states of
segments, maps and chain compute the gradient's part alone. Nothing is read back from the device.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward.gradients import Arrays, ChunkBackwardPlan, given_arrays
from kdacore_cuda.forms.backward.kernels import prepare_kernel
from kdacore_cuda.forms.backward.segments import CHUNK, WORKSPACE, ScanLaunch
from kdacore_cuda.forms.backward.segments_kernels import segment_scan_kernel, walk_warpgroups
from kdacore_cuda.forms.segments.saved import kept_arrays
from kdacore_cuda.forms.segments.sizes import SegmentLengths, chain_blocks
from kdacore_cuda.forms.slices.kernels import (
    chain_kernel,
    chunks_per_segment,
    segment_maps_kernel,
    slice_gradient_kernel,
)
from kdacore_cuda.kernel_parameters import FLAGS
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import aligned

if TYPE_CHECKING:
    import torch
else:  # plans are made for JAX too, where torch need not be installed
    torch = lazy_module("torch")


class ChunkBackwardSlicesPlan(NamedTuple):
    """What the request alone determines."""

    chunks: ChunkBackwardPlan
    """With the slice's own segments."""
    slots: int
    """Segments of one value head in the workspace, unused ones of a pack included."""
    results: int
    """``G``: sequences whose gradient at the slice's start is asked for."""
    maps: ScanLaunch
    slice_gradient: ScanLaunch
    chain: ScanLaunch
    scan: ScanLaunch


def _make_plan(r: Request, kept: bool = False) -> ChunkBackwardSlicesPlan:
    """``kept``: the forward's maps and states of segments are there."""
    plan, multiprocessors = chunk_backward.plan_of(r), multiprocessors_of(r)
    segment = chunks_per_segment(-(-r.T // CHUNK), r.B * r.HV, multiprocessors)
    segments = -(-plan.sizes["NT"] // segment)
    slots = r.T // (CHUNK * segment) + r.N if r.packed else r.N * segments
    results, items = 1 if r.packed else r.B, r.N * r.HV
    walks = slots * r.HV
    walks_of_maps, directions = (1, 1) if kept else (3, 2)
    maps_warpgroups = walk_warpgroups(walks_of_maps * walks, multiprocessors)
    scan_warpgroups = walk_warpgroups(2 * walks, multiprocessors)
    gradient_blocks = chain_blocks(results * r.HV, multiprocessors)
    blocks = chain_blocks(directions * items, multiprocessors)
    sizes = {**plan.sizes, **SegmentLengths.uniform(segment).parameters(segments)}
    if kept:
        sizes["flags"] |= FLAGS["KEPT_MAPS"]
    return ChunkBackwardSlicesPlan(
        chunks=plan._replace(sizes=sizes),
        slots=slots,
        results=results,
        maps=ScanLaunch(
            "maps", segment_maps_kernel(maps_warpgroups), 2 // maps_warpgroups * walks_of_maps * walks
        ),
        slice_gradient=ScanLaunch(
            "slice gradient", slice_gradient_kernel(gradient_blocks), gradient_blocks * results * r.HV
        ),
        chain=ScanLaunch("chain", chain_kernel(blocks), directions * blocks * items),
        scan=ScanLaunch("scan", segment_scan_kernel(scan_warpgroups), 2 // scan_warpgroups * 2 * walks),
    )


plan_of = PlanCache(_make_plan)
plan_of_kept = PlanCache(partial(_make_plan, kept=True))
"""The same where the forward's maps and states of segments are there."""


class Pending(NamedTuple):
    """What ``backward_finish`` needs of ``backward_begin``."""

    inputs: ChunkInputs
    """With g as the kernels take it."""
    arrays: Arrays
    """The workspace, ``d_o`` and ``h0``, by field of the kernels' parameters."""


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
            :func:`kdacore_cuda.forms.slices.forward.finish` keeps, or nothing: then they are computed again.
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
    plan, x = (plan_of_kept if saved else plan_of)(request), inputs
    if x.g.dtype == torch.float16:
        x = x._replace(g=x.g.float())
    d_o = x.v.new_zeros(x.v.shape) if grads.o is None else aligned(grads.o.contiguous())
    d_final = None if grads.final_state is None else grads.final_state.contiguous()
    lead = plan.slots, request.HV
    arrays = chunk_backward.make_workspace(plan.chunks, x.q, *chunk_backward.WORKSPACE)
    if saved:
        arrays |= kept_arrays(saved[0], math.prod(lead))
    forms = {n: form for n, form in WORKSPACE.items() if n not in arrays}.items()
    arrays |= {n: x.q.new_empty((*lead, size), dtype=getattr(torch, dtype)) for n, (size, dtype) in forms}
    arrays |= {"d_o": d_o, "h0": starts.contiguous()}
    result = starts.new_empty((plan.results, request.HV, 128, 128))
    prepare = prepare_kernel(plan.chunks.float_gate, plan.chunks.bounded)
    chunk_backward.launch(prepare, plan.chunks, x, arrays)
    _launch(plan, plan.maps, x, arrays)
    _launch(plan, plan.slice_gradient, x, arrays | given_arrays(d_ht=d_final, d_h0=result))
    return result, Pending(x, arrays)


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
    plan, x = (plan_of_kept if saved else plan_of)(request), pending.inputs
    ends = ends.contiguous()
    d_start = ends.new_empty(ends.shape)
    arrays = pending.arrays | {"d_ht": ends, "d_h0": d_start}
    for step in (plan.chain, plan.scan):
        _launch(plan, step, x, arrays)
    work = {name: arrays[name] for name in ("u", "dr", "h", "dh", "last", "rows")}
    d_o = arrays["d_o"]
    del arrays
    pending.arrays.clear()  # grads reads nothing else of it
    found = chunk_backward.finish(request, plan.chunks, x, work, d_o)
    return found._replace(g=chunk_backward.narrowed(found.g, inputs.g.dtype), initial_state=d_start)


def _launch(plan: ChunkBackwardSlicesPlan, step: ScanLaunch, inputs: ChunkInputs, arrays: Arrays) -> None:
    chunk_backward.launch(step.kernel, plan.chunks, inputs, arrays, step.blocks)
