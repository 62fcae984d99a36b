"""``chunk_kda`` with gradients for cached calls: everything but addresses is decided and packed once,
for the forward (:mod:`kdacore_cuda.forms.chunk_forward_fast_path`) and for the backward here."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.arrays.torch.private import allocator
from kdacore.types import ChunkInputs, FastGradients, InputGrads, Request
from kdacore_cuda.forms import chunk_forward_fast_path
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward.launches import FIRST_ARRAYS, SECOND_ARRAYS, BackwardLaunches, launches_of
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.kept import fast_path as chunk_forward_kept_fast_path
from kdacore_cuda.forms.segments import forward as segments
from kdacore_cuda.request_encoding import contiguous_strides
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.launch_sequence import LaunchSequence
from kdacore_cuda.runtime.torch_arguments import ALIGNMENT, strides_without_copies


def make_fast_gradients(
    request: Request, inputs: ChunkInputs, wanted: tuple[bool, ...]
) -> FastGradients | None:
    """:func:`kdacore_cuda.forms.chunk_forward.forward` and :func:`kdacore_cuda.forms.backward.gradients.backward`
    for calls of ``request`` whose arrays have the layout of ``inputs``.

    None where :func:`kdacore_cuda.forms.chunk_forward_fast_path.make_fast_call` is (where something is
    kept for the backward, :func:`kdacore_cuda.forms.kept.fast_path.make_fast_call`). The
    returned backward returns None, having launched nothing, where q, k, v, g or what was kept is not
    16-byte aligned, where nothing was kept, and where another device is current.

    Raises BackendBuildError or DriverError.
    """
    saves = chosen(request).saves
    kept, kept_segments = saves == "operands", saves == "maps" and segments.plan_of(request).keeps
    forward = None if kept else chunk_forward_fast_path.make_fast_call(request, inputs)
    if forward is None and not kept:
        return None
    small = (inputs.A_log, inputs.dt_bias, inputs.initial_state, inputs.cu_seqlens)
    strides = strides_without_copies(inputs, False, chunk_backward.plan_of(request).strides, small)
    if strides is None:
        return None
    if forward is None:
        forward = chunk_forward_kept_fast_path.make_fast_call(request, inputs, strides)
        if forward is None:
            return None
    needed = InputGrads(*wanted)
    launches = launches_of(request, strides, needed, kept_segments)
    return FastGradients(forward, _make_backward(launches, inputs, needed))


def _make_backward(launches: BackwardLaunches, inputs: ChunkInputs, wanted: InputGrads) -> Any:
    """The backward of :class:`kdacore.types.FastGradients`, by any launches."""
    index = inputs.q.get_device()
    current_device, current_stream = torch_launch.current_device, torch_launch.current_stream
    empty = allocator(inputs.q.device.type)
    with torch.cuda.device(index):  # kernels are loaded here, for the current context
        start_first, start_second = (
            torch_launch.sequence_start(LaunchSequence(group, names), launches.arch, index)
            for group, names in ((launches.first, FIRST_ARRAYS), (launches.second, SECOND_ARRAYS))
        )
    make_q, make_k, make_v, make_g, make_beta, make_A, make_bias, make_h0 = (
        _form(x) if is_wanted else None for x, is_wanted in zip(inputs, wanted, strict=False)
    )
    make_o = _form(inputs.v)
    both_shape, first_shape, second_shape = (
        (size,) for size in (launches.both_bytes, launches.first_bytes, launches.second_bytes)
    )
    zeroed_shape, unit, byte, float32 = (launches.zeroed_floats,), (1,), torch.uint8, torch.float32
    takes_kept = launches.takes_kept
    has_second, has_zeroed = launches.second_bytes > 0, launches.zeroed_floats > 0

    def backward(arrays: tuple[Any, ...], saved: tuple[Any, ...], d_o: Any, d_ht: Any) -> Any:
        q, k, v, g, beta, A_log, bias, initial, cu_seqlens = arrays[:9]
        q_at, k_at, v_at, g_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr()
        if (q_at | k_at | v_at | g_at) % ALIGNMENT or current_device() != index:
            return None
        kept_at = 0
        if takes_kept:
            kept_at = saved[0].data_ptr() if saved else 0
            if not kept_at or kept_at % ALIGNMENT:
                return None
        if d_o is None:
            d_o = empty(*make_o).zero_()
        elif not d_o.is_contiguous():
            d_o = d_o.contiguous()
        if d_o.data_ptr() % ALIGNMENT:
            d_o = d_o.clone()
        if d_ht is not None:
            d_ht = d_ht.contiguous()
        d_h0 = None if make_h0 is None else empty(*make_h0)
        beta_at, d_o_at = beta.data_ptr(), d_o.data_ptr()
        A_at, bias_at = 0 if A_log is None else A_log.data_ptr(), 0 if bias is None else bias.data_ptr()
        h0_at, cu_at = (
            0 if initial is None else initial.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        )
        stream = current_stream(index)
        both, first = empty(both_shape, unit, byte), empty(first_shape, unit, byte)
        both_at = both.data_ptr()
        start_first(
            stream, q_at, k_at, v_at, g_at, beta_at, A_at, bias_at, cu_at, h0_at,
            d_o_at, 0 if d_ht is None else d_ht.data_ptr(), 0 if d_h0 is None else d_h0.data_ptr(),
            kept_at, both_at, first.data_ptr(),
        )  # fmt: skip
        del first  # queued: from here on its memory may become the gradients'
        second_at = zeroed_at = 0
        if has_second:
            second = empty(second_shape, unit, byte)
            second_at = second.data_ptr()
        if has_zeroed:
            zeroed = empty(zeroed_shape, unit, float32).zero_()
            zeroed_at = zeroed.data_ptr()
        dq = None if make_q is None else empty(*make_q)
        dk = None if make_k is None else empty(*make_k)
        dv = None if make_v is None else empty(*make_v)
        dg = None if make_g is None else empty(*make_g)
        d_beta = None if make_beta is None else empty(*make_beta)
        d_A = None if make_A is None else empty(*make_A)
        d_bias = None if make_bias is None else empty(*make_bias)
        start_second(
            stream, q_at, k_at, v_at, g_at, beta_at, A_at, bias_at, cu_at, h0_at,
            d_o_at, kept_at, both_at, second_at, zeroed_at,
            0 if dq is None else dq.data_ptr(), 0 if dk is None else dk.data_ptr(),
            0 if dv is None else dv.data_ptr(), 0 if dg is None else dg.data_ptr(),
            0 if d_beta is None else d_beta.data_ptr(),
            0 if d_A is None else d_A.data_ptr(), 0 if d_bias is None else d_bias.data_ptr(),
        )  # fmt: skip
        return dq, dk, dv, dg, d_beta, d_A, d_bias, d_h0

    return backward


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides and dtype of a contiguous tensor like this one."""
    shape = tuple(x.shape)
    return shape, contiguous_strides(shape), x.dtype
