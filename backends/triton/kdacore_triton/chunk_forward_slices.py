"""The chunk forward of a slice of a row that continues on other ranks, cut where ranks exchange states.

Before the exchange: prepare, the maps of all segments, and these maps composed (``chunk_forward_slice_transition``).
After it: the state at the start of every segment, and the scan. What prepare and maps wrote is kept in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, Outputs, Request, SliceForward
from kdacore_triton.chunk_forward_plan import ChunkForwardPlan, StateLaunches, level_masks, plan_for
from kdacore_triton.fixed_launch import PlanCache
from kdacore_triton.kernel_options import dense


class _SlicePlan:
    """The launches of a slice."""

    def __init__(self, request: Request) -> None:
        self.chunks: ChunkForwardPlan = plan_for(request)
        self.states: StateLaunches = self.chunks.slice_launches()


_plan_for = PlanCache(_SlicePlan)


class Pending(NamedTuple):
    """What :func:`finish` needs of :func:`begin`."""

    records: torch.Tensor
    decay: torch.Tensor
    maps: torch.Tensor
    o: torch.Tensor
    """The output: where a pack ends before T, zero from there on."""
    cu_seqlens: Any


def begin(request: Request, inputs: ChunkInputs, leaving: torch.Tensor | None) -> SliceForward:
    """The map of the leaving part; see :class:`kdacore.types.SliceFunctions`."""
    slice_plan = _plan_for(request)
    plan, states = slice_plan.chunks, slice_plan.states
    segments, transition = states.segments, states.transition
    if segments is None or transition is None:
        raise TypeError("not the launches of a slice")
    q, k, v, g, beta, A_log, dt_bias = (dense(x) for x in inputs[:7])
    cu_seqlens = dense(inputs.cu_seqlens)
    if plan.upcast:
        q, k, v = q.float(), k.float(), v.float()
    device = v.device

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    records = torch.empty(plan.records * plan.record_size, dtype=plan.record_dtype, device=device)
    decay = floats(plan.records * plan.decay_size)
    o = torch.empty_like(v)
    levels = level_masks(plan.levels, plan.levels_dtype, device) if plan.levels else None
    tail = (o,) if plan.zeroes_tail else ()
    plan.prepare(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, levels, records, decay, *tail)
    maps = floats(segments.maps_size)
    segments.maps(records, decay, None, maps, cu_seqlens)
    G, HV, K, V = (1 if request.packed else request.B), request.HV, request.K, request.V
    M, C = floats(G, HV, K, K), floats(G, HV, K, V)
    transition(maps, M, C, cu_seqlens, numbers=(leaving,))
    return SliceForward(M, C, Pending(records, decay, maps, o, cu_seqlens))


def finish(request: Request, inputs: ChunkInputs, pending: Pending, starts: torch.Tensor) -> Outputs:
    """The results; see :class:`kdacore.types.SliceFunctions`."""
    slice_plan = _plan_for(request)
    plan, states = slice_plan.chunks, slice_plan.states
    if states.segments is None:
        raise TypeError("not the launches of a slice")
    records, decay, maps, o, cu_seqlens = pending
    starts = starts.contiguous()
    final = starts.new_empty(request.state_shape) if request.output_final_state else None
    checkpoints = starts.new_empty(request.checkpoint_shape) if request.checkpoint_every else None
    segment_starts = starts.new_empty(states.segments.starts_size)
    states.segments.starts(maps, starts, segment_starts, cu_seqlens)
    states.scan(records, decay, o, starts, segment_starts, final, checkpoints, cu_seqlens)
    return Outputs(o.to(torch.bfloat16) if plan.upcast else o, final, checkpoints)
