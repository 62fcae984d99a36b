"""Host side of ``chunk_kda`` on a slice of a row that continues on other ranks, on Hopper: the forward
in segments (:mod:`kdacore_cuda.forms.segments.forward`), cut where ranks exchange states.

Before the exchange: prepare (operands of every chunk), maps (how each segment maps the state at its
start to the state at its end), transition (the maps of the leaving part composed). After it: starts
(the state at each segment's start), output (every segment from its start). What prepare and maps
compute is kept in between; maps and starting states also for a backward, unless rows are packed. Packs
of many sequences compute operands and maps of the leaving part alone, and their results by a call of
their own. Nothing is read back from the device.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import ChunkInputs, Outputs, Request, SliceForward
from kdacore_cuda.choice import finishes_as_whole
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.segments.forward import (
    CHUNK_OPERANDS_BYTES,
    fill_prepare_values,
    launcher,
)
from kdacore_cuda.forms.segments.kernels import (
    output_blocks,
    output_kernel,
    segments_prepare_kernel,
)
from kdacore_cuda.forms.segments.saved import MAP_BYTES, START_BYTES
from kdacore_cuda.forms.segments.sizes import SegmentLengths, chain_blocks
from kdacore_cuda.forms.slices.kernels import (
    chunks_per_segment,
    maps_kernel,
    starts_kernel,
    transition_kernel,
)
from kdacore_cuda.kernel_parameters import CHUNK_BACKWARD, TRANSITION, V_STRIDES
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.launch_order import check_order
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import address, contiguous, token_arguments

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:  # plans are made for JAX too, where torch need not be installed
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")

CHUNK = 64


class ChunkForwardSlicesPlan(NamedTuple):
    """What the request alone determines. Launches come with their blocks."""

    chunks: chunk_backward.ChunkBackwardPlan
    as_whole: bool
    """The results come from :func:`kdacore_cuda.forms.chunk_forward.forward`."""
    results: int
    """``G``: sequences whose transition is asked for."""
    prepare: tuple[Launcher, int]
    prepare_values: tuple[Any, ...]
    """Its parameters; those that a call changes are 0."""
    maps: tuple[Launcher, int]
    transition: tuple[Launcher, int]
    transition_sizes: tuple[int, ...]
    """The numbers among its parameters."""
    starts: tuple[Launcher, int] | None
    """None if no sequence can have more than one segment."""
    output: tuple[Launcher, int]
    sizes: tuple[int, ...]
    """The numbers among the parameters of maps, starts and output."""
    addends_offset: int
    """Byte of the operands' buffer where the B of segments' maps begin."""
    operands_bytes: int
    """Of the chunks' operands, and of those B."""
    starts_offset: int
    """Byte of the segments' buffer where starting states begin; maps come first."""
    segments_bytes: int
    """Of that buffer."""


def _make_plan(r: Request) -> ChunkForwardSlicesPlan:
    chunks = chunk_backward.plan_of(r)
    NT, units, flags = (chunks.sizes[name] for name in ("NT", "units", "flags"))
    items, multiprocessors = r.N * r.HV, multiprocessors_of(r)
    results = 1 if r.packed else r.B
    segment = chunks_per_segment(-(-r.T // CHUNK), r.B * r.HV, multiprocessors)
    segments = -(-NT // segment)
    lengths = tuple(SegmentLengths.uniform(segment).parameters(segments).values())
    slots = r.T // (CHUNK * segment) + r.N if r.packed else r.N * segments
    as_whole = finishes_as_whole(items, r.packed, multiprocessors)
    prepare = segments_prepare_kernel(chunks.float_gate, chunks.bounded, as_whole)
    blocks = chain_blocks(2 * results * r.HV, multiprocessors)
    start_blocks = chain_blocks(items, multiprocessors)
    outputs = output_blocks(slots * r.HV, multiprocessors)
    starts_offset = slots * r.HV * MAP_BYTES
    finish = [starts_kernel(start_blocks)] if segments > 1 else []
    finish.append(output_kernel(outputs))
    check_order((prepare.source.entry, maps_kernel(as_whole).source.entry))
    check_order((x.source.entry for x in finish), one_segment=segments < 2)
    return ChunkForwardSlicesPlan(
        chunks=chunks,
        as_whole=as_whole,
        results=results,
        prepare=(chunk_backward.launcher(prepare), units),
        prepare_values=tuple(chunks.sizes.get(name, 0) for name, _ in CHUNK_BACKWARD.fields),
        maps=(launcher(maps_kernel(as_whole)), 2 * slots * r.HV),
        transition=(_transition_launcher(blocks), 2 * results * r.HV * blocks),
        transition_sizes=(r.T, r.N, r.HV, NT, *lengths, flags),
        starts=(launcher(starts_kernel(start_blocks)), start_blocks * items) if segments > 1 else None,
        output=(launcher(output_kernel(outputs)), outputs * slots * r.HV),
        sizes=(r.T, r.N, r.HV, NT, *lengths, r.checkpoint_every, -1, 0, flags),
        addends_offset=units * CHUNK_OPERANDS_BYTES,
        operands_bytes=units * CHUNK_OPERANDS_BYTES + slots * r.HV * START_BYTES,
        starts_offset=starts_offset,
        segments_bytes=starts_offset + slots * r.HV * START_BYTES,
    )


plan_of = PlanCache(_make_plan)


@cache
def _transition_launcher(blocks: int) -> Launcher:
    kernel = transition_kernel(blocks)
    return Launcher(kernel.source, TRANSITION, kernel.threads, kernel.shared)


class Pending(NamedTuple):
    """What ``finish`` needs of ``begin``."""

    operands: torch.Tensor
    """Bytes: the chunks' operands, the B of the segments' maps."""
    segments: torch.Tensor
    """Bytes: the segments' maps, room for the segments' starting states."""
    values: int
    """Address of v, as kernels read it."""
    value_strides: tuple[int, ...]
    """Its batch, token and head strides."""
    cu_seqlens: torch.Tensor | None
    kept: tuple[Any, ...]
    """Inputs, copies among them, which live until the launches are queued."""


def begin(request: Request, inputs: ChunkInputs, leaving: torch.Tensor | None) -> SliceForward:
    """What the slice's tokens do to the state of the sequence that the last of them belongs to.

    Args:
        request: bfloat16 q, k and v, K = V = 128; as :class:`kdacore.types.SliceFunctions` says.
        inputs: its arrays.
        leaving: not used: it is the sequence whose last offset is T.

    Returns:
        M and C ``[G, HV, 128, 128]``; of a slice whose last token is padding, the unit matrix and
        zeros.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    plan = plan_of(request)
    if inputs.g.dtype == torch.float16:
        inputs = inputs._replace(g=inputs.g.float())
    addresses, strides, kept = token_arguments(inputs, False, plan.chunks.strides)
    small = tuple(map(contiguous, (inputs.A_log, inputs.dt_bias, inputs.cu_seqlens)))
    like = inputs.v
    operands, segments = (
        like.new_empty(size, dtype=torch.uint8) for size in (plan.operands_bytes, plan.segments_bytes)
    )
    M, C = (like.new_empty((plan.results, request.HV, 128, 128), dtype=torch.float32) for _ in range(2))
    cu_seqlens, needed = small[2], (inputs, kept, small)
    pending = Pending(operands, segments, addresses[2], strides[V_STRIDES], cu_seqlens, needed)
    _launch(
        plan,
        plan.prepare,
        like,
        fill_prepare_values(plan.prepare_values, addresses, strides, small, operands.data_ptr()),
    )
    _launch(plan, plan.maps, like, _segment_values(plan, pending, 0, 0, 0, 0))
    addends = operands.data_ptr() + plan.addends_offset
    values = (address(cu_seqlens), addends, segments.data_ptr(), M.data_ptr(), C.data_ptr())
    _launch(plan, plan.transition, like, (*values, *plan.transition_sizes))
    if plan.as_whole:
        return SliceForward(M, C)
    return SliceForward(M, C, pending)


def finish(request: Request, inputs: ChunkInputs, pending: Pending | None, starts: torch.Tensor) -> Outputs:
    """The results of the slice.

    Args:
        request: as of :func:`begin`.
        inputs: as of :func:`begin`.
        pending: what it left.
        starts: ``[N, HV, 128, 128]`` float32, K first: the state each sequence's local part starts
            from.

    Returns:
        As :func:`kdacore_cuda.forms.chunk_forward.forward`. Where a backward may follow and rows are not packed,
        ``saved`` has the maps and starting states of all segments, 128 KiB for each segment and head (17 MB
        for 65,536 tokens of 16 heads). For a pack it is empty: the forward makes no map of the last segment
        of a sequence, which the backward needs.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    plan, like = plan_of(request), inputs.v
    starts = starts.contiguous()
    if pending is None:
        return chunk_forward.forward(request, inputs._replace(initial_state=starts))
    o = like.new_empty((request.B, request.T, request.HV, request.V))
    final = starts.new_empty(starts.shape) if request.output_final_state else None
    checkpoints = starts.new_empty(request.checkpoint_shape) if request.checkpoint_every else None
    values = _segment_values(
        plan, pending, o.data_ptr(), starts.data_ptr(), address(final), address(checkpoints)
    )
    if plan.starts is not None:
        _launch(plan, plan.starts, like, values)
    _launch(plan, plan.output, like, values)
    saved = (pending.segments,) if request.needs_grad and not request.packed else ()
    return Outputs(o, final, checkpoints, saved)


def _segment_values(
    plan: ChunkForwardSlicesPlan,
    pending: Pending,
    o: int,
    starts: int,
    final: int,
    checkpoints: int,
) -> tuple[Any, ...]:
    """Parameters of maps, starts and output: no pools, no checkpoints at chosen tokens."""
    row, maps = plan.sizes[2] * 128 * 128, pending.segments.data_ptr()
    return (
        *(pending.values, address(pending.cu_seqlens), o, starts, final, checkpoints),
        *(pending.operands.data_ptr(), pending.operands.data_ptr() + plan.addends_offset),
        *(maps, maps + plan.starts_offset),
        *(0, 0, 0, 0, 0, 0, row, row),
        *(*pending.value_strides, *plan.sizes),
    )


def _launch(
    plan: ChunkForwardSlicesPlan, launch: tuple[Launcher, int], like: torch.Tensor, values: tuple[Any, ...]
) -> None:
    launcher, blocks = launch
    torch_launch.launch(launcher, blocks, plan.chunks.arch, like, values)
