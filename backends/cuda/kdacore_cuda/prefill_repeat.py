"""``chunk_kda`` without gradients for calls seen before: all but addresses is decided and packed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kdacore.frameworks.torch_empty import Empty, allocator
from kdacore.types import ChunkInputs, Request, Step
from kdacore_cuda import prefill, runtime, segments
from kdacore_cuda.arrays import ALIGNMENT, contiguous_of, strides_as_given
from kdacore_cuda.fixed import FixedLauncher, Start
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import CHUNK_FORWARD, SEGMENTS

Launch = Callable[[int, tuple[int, ...], int, int, int], None]
"""A call's launches on a stream, of addresses: those of ``_TOKENS``; o; the initial and the final state. 0 where an
array is absent."""

_TOKENS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
_STRIDES = tuple(f"{name}_{axis}" for name in _TOKENS[:5] for axis in ("sb", "st", "sh"))
_RECORD = ("kg", "qg", "w", "u", "aqk", "last")


def repeat(request: Request, inputs: ChunkInputs) -> Step | None:
    """:func:`kdacore_cuda.prefill.forward` for calls whose arrays lie in memory as these do.

    None where an array would have to be copied or checkpoints are asked for, and from the step where one starts off
    16 bytes.
    """
    r, plan = request, prefill.plan_of(request)
    small = (inputs.A_log, inputs.dt_bias, inputs.initial_state, inputs.cu_seqlens)
    strides = strides_as_given(inputs, False, plan.strides, small)
    if strides is None or plan.widen_gate or r.checkpoint_every or not plan.grid:
        return None
    index, current_device, current_stream = (
        inputs.q.get_device(),
        runtime.current_device,
        runtime.current_stream,
    )
    empty = allocator(inputs.v.device.type)
    with torch.cuda.device(index):  # loads the kernels, which is a matter of the current context
        launch = (_segments if plan.segmented else _fused)(request, strides, index, empty)
    o_shape, state_shape = (r.B, r.T, r.HV, r.V), r.state_shape
    o_strides, state_strides = contiguous_of(o_shape), contiguous_of(state_shape)
    o_dtype, state_dtype, returns_state = inputs.v.dtype, plan.state_dtype, r.output_final_state

    def step(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        q, k, v, g, beta, A_log, bias, initial, cu_seqlens, _ = arrays
        at_q, at_k, at_v, at_g = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr()
        if (at_q | at_k | at_v | at_g) % ALIGNMENT or current_device() != index:
            return None
        o = empty(o_shape, o_strides, o_dtype)
        state = empty(state_shape, state_strides, state_dtype) if returns_state else None
        launch(
            current_stream(index),
            (
                at_q, at_k, at_v, at_g, beta.data_ptr(), 0 if A_log is None else A_log.data_ptr(),
                0 if bias is None else bias.data_ptr(), 0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            ),
            o.data_ptr(),
            0 if initial is None else initial.data_ptr(),
            0 if state is None else state.data_ptr(),
        )  # fmt: skip
        return o, state, None

    return step


def _starter(
    launcher: Launcher, given: tuple[str, ...], fixed: Mapping[str, float], grid: int, arch: str, index: int
) -> Start:
    """The launch with ``fixed`` packed for good; nothing for no blocks, as of no tokens."""
    if not grid:
        return lambda stream, values: None
    return runtime.starter(FixedLauncher(launcher, given, fixed), grid, arch, index)


def _fused(request: Request, strides: tuple[int, ...], index: int, empty: Empty) -> Launch:
    plan = prefill.plan_of(request)
    given = (*_TOKENS, "o", "h0", "ht", "cut_states", "launch")
    fixed = CHUNK_FORWARD.last(*strides, *plan.sizes)
    start = _starter(plan.launcher, given, fixed, plan.grid, plan.arch, index)
    size, counter = plan.hand_over, prefill.LAUNCHES
    shape, ones = (size,), (1,)

    def launch(stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int) -> None:
        handed = empty(shape, ones, torch.float32) if size else None
        at = 0 if handed is None else handed.data_ptr()
        start(stream, tokens + (o, initial, final, at, next(counter)))  # noqa: RUF005  # (*a, b) makes a list first

    return launch


def _segments(request: Request, strides: tuple[int, ...], index: int, empty: Empty) -> Launch:
    plan, arch = segments.plan_of(request), prefill.plan_of(request).arch
    (_, prepare, units), *others = plan.steps
    fixed = {**plan.chunks.sizes, **dict(zip(_STRIDES, strides, strict=True))}
    start = _starter(prepare, (*_TOKENS, *_RECORD), fixed, units, arch, index)
    given = ("cu_seqlens", "o", "h0", "ht", "chunk_operands", "maps", "starts")
    sizes = SEGMENTS.last(*plan.sizes)
    later = [_starter(launcher, given, sizes, grid, arch, index) for _, launcher, grid in others]
    kg, qg, w, u, aqk, last = (segments.RECORD[name][0] for name in _RECORD)
    to_maps, to_starts = plan.to_maps, plan.to_starts
    shape, ones = (plan.work_bytes,), (1,)

    def launch(stream: int, tokens: tuple[int, ...], o: int, initial: int, final: int) -> None:
        work = empty(shape, ones, torch.uint8)
        at = work.data_ptr()
        start(stream, tokens + (at + kg, at + qg, at + w, at + u, at + aqk, at + last))  # noqa: RUF005
        values = (tokens[7], o, initial, final, at, at + to_maps, at + to_starts)
        for begin in later:
            begin(stream, values)

    return launch
