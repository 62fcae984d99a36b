"""The recurrent ops for cached calls: everything but addresses is decided and packed once."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.arrays.torch.private import allocator
from kdacore.types import FastCall, RecurrentInputs, Request
from kdacore_cuda.forms.recurrent.launches import sequence_of
from kdacore_cuda.forms.recurrent.sizes import plan_of
from kdacore_cuda.request_encoding import contiguous_strides
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.torch_arguments import ALIGNMENT, strides_without_copies


def make_fast_call(request: Request, inputs: RecurrentInputs) -> FastCall | None:
    """:func:`kdacore_cuda.forms.recurrent.forward.forward` for calls of ``request`` whose arrays have the layout
    of ``inputs``.

    None where an array would have to be copied. The returned function takes a call's arrays in the
    order of :class:`kdacore.types.RecurrentInputs` and returns None, having launched nothing, where
    an array is not 16-byte aligned or another device is current.

    Raises BackendBuildError or DriverError.
    """
    r, plan = request, plan_of(request)
    q, _, v, _, _, A_log, bias, source, cu_seqlens, _, indices, accepted, out, mask, rows, pool = inputs
    small = (A_log, bias, cu_seqlens, indices, accepted, out, mask, rows)
    strides = strides_without_copies(inputs, r.scalar_gate, plan.strides, small)
    if strides is None:
        return None
    if any(x is not None and not x[:1].is_contiguous() for x in (source, pool)):
        return None
    row, pool_row = (
        plan.state_row if x is None or x.is_contiguous() else x.stride(0) for x in (source, pool)
    )
    in_place, fresh = r.inplace_state, r.output_final_state and not r.inplace_state
    if (row | pool_row) * plan.state_size % ALIGNMENT:
        return None
    written_row = plan.state_row if not in_place else row if pool is None else pool_row
    index = q.get_device()
    current_device, current_stream = torch_launch.current_device, torch_launch.current_stream
    with torch.cuda.device(index):  # the kernel is loaded here, for the current context
        sequence = sequence_of(r, strides, (row, written_row), True)
        start = torch_launch.sequence_start(sequence, plan.arch, index)
    empty = allocator(v.device.type)
    o_shape, o_strides, o_dtype = plan.o_shape, contiguous_strides(plan.o_shape), v.dtype
    state_shape, state_strides, state_dtype = (
        r.state_shape,
        contiguous_strides(r.state_shape),
        plan.state_dtype,
    )
    returns_state = r.output_final_state

    def fast_call(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        q, k, v, g, beta, A_log, bias, state, cu_seqlens, _, indices, accepted, o, mask, rows, pool = arrays
        q_at, k_at, v_at, g_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr()
        bias_at = 0 if bias is None else bias.data_ptr()
        state_at = written_at = 0 if state is None else state.data_ptr()
        if pool is not None:
            state, written_at = pool, pool.data_ptr()
        o_at = 0 if o is None else o.data_ptr()
        addresses = q_at | k_at | v_at | g_at | bias_at | state_at | written_at | o_at
        if addresses % ALIGNMENT or current_device() != index:
            return None
        indices_at = 0 if indices is None else indices.data_ptr()
        if o is None:
            o = empty(o_shape, o_strides, o_dtype)
            o_at = o.data_ptr()
        if fresh:
            state = empty(state_shape, state_strides, state_dtype)
            written_at = state.data_ptr()
        elif not in_place:
            state, written_at = None, 0
        start(
            current_stream(index), q_at, k_at, v_at, g_at, beta.data_ptr(),
            0 if A_log is None else A_log.data_ptr(), bias_at,
            0 if cu_seqlens is None else cu_seqlens.data_ptr(), o_at, state_at, written_at,
            indices_at, 0 if accepted is None else accepted.data_ptr(), 0 if mask is None else mask.data_ptr(),
            indices_at if rows is None else rows.data_ptr(),
        )  # fmt: skip
        return o, state if returns_state else None, None

    return fast_call
