"""The forward of :mod:`kdacore_cuda.forms.kept.forward` for cached calls: everything but addresses is
decided and packed once."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.arrays.torch.private import allocator
from kdacore.types import ChunkInputs, FastCall, Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.kept.launches import ARRAYS, launches_of
from kdacore_cuda.forms.kept.sizes import kept_bytes
from kdacore_cuda.request_encoding import contiguous_strides
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.launch_sequence import LaunchSequence
from kdacore_cuda.runtime.torch_arguments import ALIGNMENT, torch_dtype


def make_fast_call(request: Request, inputs: ChunkInputs, strides: tuple[int, ...]) -> FastCall | None:
    """:func:`kdacore_cuda.forms.kept.forward.forward` for calls of ``request`` whose arrays have the
    layout of ``inputs``, none of which would have to be copied.

    None where g is float16. The returned function gives what was kept behind the three results, and
    None, having launched nothing, where q, k, v or g is not 16-byte aligned or another device is
    current.

    Raises BackendBuildError or DriverError.
    """
    r, plan = request, chunk_backward.plan_of(request)
    if inputs.g.dtype == torch.float16:
        return None
    index = inputs.q.get_device()
    current_device, current_stream = torch_launch.current_device, torch_launch.current_stream
    empty = allocator(inputs.v.device.type)
    with torch.cuda.device(index):  # kernels are loaded here, for the current context
        sequence = LaunchSequence(launches_of(r, strides), ARRAYS)
        start = torch_launch.sequence_start(sequence, plan.arch, index)
    o_shape, state_shape = (r.B, r.T, r.HV, r.V), r.state_shape
    o_strides, state_strides = contiguous_strides(o_shape), contiguous_strides(state_shape)
    o_dtype, state_dtype = inputs.v.dtype, torch_dtype(r, r.state_dtype)
    kept_shape, unit, byte = (kept_bytes(plan.sizes["units"]),), (1,), torch.uint8
    returns_state = r.output_final_state

    def fast_call(arrays: tuple[Any, ...]) -> tuple[Any, ...] | None:
        q, k, v, g, beta, A_log, bias, initial, cu_seqlens = arrays[:9]
        q_at, k_at, v_at, g_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr()
        if (q_at | k_at | v_at | g_at) % ALIGNMENT or current_device() != index:
            return None
        o = empty(o_shape, o_strides, o_dtype)
        state = empty(state_shape, state_strides, state_dtype) if returns_state else None
        kept = empty(kept_shape, unit, byte)
        start(
            current_stream(index),
            q_at, k_at, v_at, g_at, beta.data_ptr(),
            0 if A_log is None else A_log.data_ptr(), 0 if bias is None else bias.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(), 0 if initial is None else initial.data_ptr(),
            o.data_ptr(), 0 if state is None else state.data_ptr(), kept.data_ptr(),
        )  # fmt: skip
        return o, state, None, kept

    return fast_call
