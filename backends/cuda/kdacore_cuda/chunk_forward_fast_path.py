"""``chunk_kda`` without gradients for cached calls: everything but addresses is decided and packed
once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kdacore.arrays.torch.private import Empty, allocator
from kdacore.types import ChunkInputs, FastCall, Request
from kdacore_cuda import (
    chunk_forward,
    chunk_forward_checkpoints,
    chunk_forward_dataflow,
    chunk_forward_segments,
    torch_launch,
)
from kdacore_cuda.chunk_forward_kernels import has_hopper_kernel
from kdacore_cuda.chunk_forward_segments import CHUNK_OPERANDS
from kdacore_cuda.kernel_parameters import CHECKPOINT_TAIL, CHUNK_FORWARD, SEGMENTS, WALK
from kdacore_cuda.prepacked_launch import PrepackedLauncher
from kdacore_cuda.request_encoding import contiguous_strides
from kdacore_cuda.torch_arguments import ALIGNMENT, contiguous_rows, strides_without_copies

Launch = Callable[[int, tuple[int, ...], int, int, int, tuple[int, ...]], None]
"""``launch(stream, tokens, o, initial_state, final_state, rows)`` makes a call's launches. All but
the stream are addresses, 0 for an absent array; ``tokens`` are those of ``_TOKENS``, ``rows`` those
of ``_ROWS``, and of ``_MARKS`` in calls with checkpoints at chosen tokens."""

_TOKENS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
_STRIDES = tuple(f"{name}_{axis}" for name in _TOKENS[:5] for axis in ("sb", "st", "sh"))
_ROWS, _MARKS = ("reads", "has_initial", "writes"), ("mark_offsets", "mark_rows")
_OPERANDS = ("kg", "qg", "w", "u", "aqk", "last")


def make_fast_call(request: Request, inputs: ChunkInputs) -> FastCall | None:
    """:func:`kdacore_cuda.chunk_forward.forward` for calls of ``request`` whose arrays have the
    layout of ``inputs``.

    None where an array would have to be copied, where g is float16, and where checkpoints of every
    block are asked for. The returned function takes a call's arrays in the order of
    :class:`kdacore.types.ChunkInputs` and returns None, having launched nothing, where q, k, v or g
    is not 16-byte aligned or another device is current.

    Raises BackendBuildError or DriverError.
    """
    r, plan = request, chunk_forward.plan_of(request)
    _, _, _, _, _, A_log, bias, initial, cu_seqlens, _, reads, mask, writes, pool, offsets, marked, out = (
        inputs
    )
    small = (A_log, bias, cu_seqlens, reads, mask, writes, offsets, marked, out)
    strides = strides_without_copies(inputs, False, plan.strides, small)
    if strides is None or plan.widen_gate or r.checkpoint_every or not plan.grid:
        return None
    if any(x is not None and not x[:1].is_contiguous() for x in (initial, pool)):
        return None
    row = r.HV * r.K * r.V
    initial_row, pool_row = (contiguous_rows(x, row)[1] for x in (initial, pool))
    if plan.in_dataflow and initial_row != row:
        return None
    in_place = r.inplace_state
    written_row = row if not in_place else initial_row if pool is None else pool_row
    index = inputs.q.get_device()
    current_device, current_stream = torch_launch.current_device, torch_launch.current_stream
    empty = allocator(inputs.v.device.type)
    with torch.cuda.device(index):  # kernels are loaded here, for the current context
        launch = _launch_maker(plan)(request, strides, (initial_row, written_row), index, empty)
    o_shape, state_shape = (r.B, r.T, r.HV, r.V), r.state_shape
    o_strides, state_strides = contiguous_strides(o_shape), contiguous_strides(state_shape)
    o_dtype, state_dtype = inputs.v.dtype, plan.state_dtype
    returns_state, fresh = r.output_final_state, r.output_final_state and not in_place

    def fast_call(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        (
            q,
            k,
            v,
            g,
            beta,
            A_log,
            bias,
            initial,
            cu_seqlens,
            _,
            reads,
            mask,
            writes,
            pool,
            offsets,
            marked,
            o,
        ) = arrays
        q_at, k_at, v_at, g_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr()
        if (q_at | k_at | v_at | g_at) % ALIGNMENT or current_device() != index:
            return None
        if o is None:
            o = empty(o_shape, o_strides, o_dtype)
        elif o.data_ptr() % ALIGNMENT:
            return None
        state, rows = None, _NO_ROWS
        if fresh:
            state = empty(state_shape, state_strides, state_dtype)
        elif in_place:
            state = initial if pool is None else pool
        if reads is not None or mask is not None or writes is not None:
            rows = _rows(reads, mask, writes, in_place)
        if offsets is not None:
            rows += (offsets.data_ptr(), marked.data_ptr())
        launch(
            current_stream(index),
            (
                q_at, k_at, v_at, g_at, beta.data_ptr(), 0 if A_log is None else A_log.data_ptr(),
                0 if bias is None else bias.data_ptr(), 0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            ),
            o.data_ptr(),
            0 if initial is None else initial.data_ptr(),
            0 if state is None else state.data_ptr(),
            rows,
        )  # fmt: skip
        return o, state if returns_state else None, None

    return fast_call


_NO_ROWS: tuple[int, ...] = (0, 0, 0)


def _rows(reads: Any, mask: Any, writes: Any, in_place: bool) -> tuple[int, ...]:
    reads_at = 0 if reads is None else reads.data_ptr()
    writes_at = 0 if not in_place else reads_at if writes is None else writes.data_ptr()
    return reads_at, 0 if mask is None else mask.data_ptr(), writes_at


def _launch_maker(plan: chunk_forward.ChunkForwardPlan) -> Callable[..., Launch]:
    if plan.in_dataflow:
        return _dataflow_launch
    return _segments_launch if plan.in_segments else _fused_launch


def _fused_launch(
    request: Request, strides: tuple[int, ...], state_strides: tuple[int, int], index: int, empty: Empty
) -> Launch:
    plan = chunk_forward.plan_of(request)
    if request.checkpoint_count:
        return _fused_marked_launch(request, strides, state_strides, index, empty)
    per_call = (*_TOKENS, "o", "h0", "ht", "cut_states", *_ROWS, "launch")
    fixed = CHUNK_FORWARD.last(*state_strides, *strides, *plan.sizes)
    packed = PrepackedLauncher(plan.launcher, per_call, fixed)
    start = torch_launch.prepacked_start(packed, plan.grid, plan.arch, index)
    size, numbers = plan.cut_states_size, chunk_forward.LAUNCH_NUMBERS
    shape, unit_stride = (size,), (1,)

    def launch(
        stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int, rows: tuple[int, ...]
    ) -> None:
        cut_states = empty(shape, unit_stride, torch.float32) if size else None
        at = 0 if cut_states is None else cut_states.data_ptr()
        start(stream, tokens + (o, initial, final, at, *rows, next(numbers)))  # noqa: RUF005  # (*a, b) makes a list first

    return launch


def _fused_marked_launch(
    request: Request, strides: tuple[int, ...], state_strides: tuple[int, int], index: int, empty: Empty
) -> Launch:
    """With checkpoints at chosen tokens, and the launch that they need where a step has more than 16 tokens."""
    plan = chunk_forward.plan_of(request)
    per_call = (*_TOKENS, "o", "h0", "ht", "cut_states", *_ROWS, *_MARKS, "mark_states", "launch")
    fixed = CHUNK_FORWARD.last(*state_strides, *strides, *plan.sizes)
    packed = PrepackedLauncher(plan.launcher, per_call, fixed)
    start = torch_launch.prepacked_start(packed, plan.grid, plan.arch, index)
    start_tail = None
    if has_hopper_kernel(request.K, plan.arch):
        tail_sizes = chunk_forward_checkpoints.tail_sizes(request, request.spec("g").dtype)
        tail_call = (*_TOKENS[1:], "ht", "reads", *_MARKS, "mark_states")
        tail = PrepackedLauncher(
            chunk_forward_checkpoints.tail_launcher(),
            tail_call,
            CHECKPOINT_TAIL.last(state_strides[1], *strides[3:], *tail_sizes),
        )
        start_tail = torch_launch.prepacked_start(
            tail, chunk_forward_checkpoints.tail_grid(request), plan.arch, index
        )
    size, numbers = plan.cut_states_size, chunk_forward.LAUNCH_NUMBERS
    shape, unit_stride = (size,), (1,)
    states_shape = (request.checkpoint_count * request.HV * request.K * request.V,)

    def launch(
        stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int, rows: tuple[int, ...]
    ) -> None:
        cut_states = empty(shape, unit_stride, torch.float32) if size else None
        states = empty(states_shape, unit_stride, torch.float32) if start_tail else None
        cut_at = 0 if cut_states is None else cut_states.data_ptr()
        states_at = 0 if states is None else states.data_ptr()
        start(stream, (*tokens, o, initial, final, cut_at, *rows, states_at, next(numbers)))
        if start_tail:
            start_tail(stream, (*tokens[1:], final, rows[0], rows[3], rows[4], states_at))

    return launch


def _dataflow_launch(
    request: Request, strides: tuple[int, ...], state_strides: tuple[int, int], index: int, empty: Empty
) -> Launch:
    plan = chunk_forward_dataflow.plan_of(request)
    fixed = {**plan.chunks.sizes, **dict(zip(_STRIDES, strides, strict=True))}
    prepare = PrepackedLauncher(plan.prepare, (*_TOKENS, *_OPERANDS, "ready", "launch"), fixed)
    start_prepare = torch_launch.prepacked_start(prepare, plan.prepare_grid, plan.chunks.arch, index)
    per_call = ("o", "h0", "ht", "chunk_operands", "ready", "launch")
    walk = PrepackedLauncher(chunk_forward_dataflow.walk_launcher(), per_call, WALK.last(*plan.walk_sizes))
    start_walk = torch_launch.prepacked_start(walk, plan.walk_grid, plan.chunks.arch, index)
    kg, qg, w, u, aqk, last = (CHUNK_OPERANDS[name][0] for name in _OPERANDS)
    flags_offset, numbers = plan.flags_offset, chunk_forward_dataflow.LAUNCH_NUMBERS
    shape, unit_stride = (plan.workspace_bytes,), (1,)

    def launch(
        stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int, rows: tuple[int, ...]
    ) -> None:
        workspace = empty(shape, unit_stride, torch.uint8)
        at, number = workspace.data_ptr(), next(numbers)
        ready = at + flags_offset
        operands = (at + kg, at + qg, at + w, at + u, at + aqk, at + last)
        start_prepare(stream, tokens + operands + (ready, number))
        start_walk(stream, (o, initial, final, at, ready, number))

    return launch


def _segments_launch(
    request: Request, strides: tuple[int, ...], state_strides: tuple[int, int], index: int, empty: Empty
) -> Launch:
    plan, arch = chunk_forward_segments.plan_of(request), chunk_forward.plan_of(request).arch
    (_, prepare, units), *others = plan.launches
    fixed = {**plan.chunks.sizes, **dict(zip(_STRIDES, strides, strict=True))}
    per_unit: tuple[str, ...] = (*_TOKENS, *_OPERANDS)
    if plan.marked:
        fixed |= dict(zip(("marks", "null_index"), plan.marked, strict=True))
        per_unit = (*_MARKS, *per_unit)
    packed = PrepackedLauncher(prepare, per_unit, fixed)
    start_prepare = torch_launch.prepacked_start(packed, units, arch, index)
    per_call: tuple[str, ...] = ("cu_seqlens", "o", "h0", "ht", "chunk_operands", "maps", "starts", *_ROWS)
    if plan.marked:
        per_call += (*_MARKS, "mark_states")
    sizes = SEGMENTS.last(*state_strides, *plan.sizes)
    start_others = [
        torch_launch.prepacked_start(PrepackedLauncher(launcher, per_call, sizes), grid, arch, index)
        for _, launcher, grid in others
    ]
    kg, qg, w, u, aqk, last = (plan.records_offset + CHUNK_OPERANDS[name][0] for name in _OPERANDS)
    operands_offset, maps_offset, starts_offset = plan.operands_offset, plan.maps_offset, plan.starts_offset
    marked = bool(plan.marked)
    shape, unit_stride = (plan.workspace_bytes,), (1,)

    def launch(
        stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int, rows: tuple[int, ...]
    ) -> None:
        workspace = empty(shape, unit_stride, torch.uint8)
        at = workspace.data_ptr()
        operands = (at + kg, at + qg, at + w, at + u, at + aqk, at + last)
        start_prepare(stream, rows[3:] + tokens + operands if marked else tokens + operands)
        values = (
            tokens[7], o, initial, final, at + operands_offset, at + maps_offset, at + starts_offset, *rows,
        )  # fmt: skip
        if marked:
            values += (at,)
        for start in start_others:
            start(stream, values)

    return launch
