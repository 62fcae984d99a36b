"""``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on torch tensors, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdacore.lazy import lazy_module
from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_cuda.forms.recurrent.launches import sequence_of
from kdacore_cuda.forms.recurrent.sizes import plan_of
from kdacore_cuda.runtime.torch_arguments import (
    ALIGNMENT,
    address,
    contiguous,
    contiguous_rows,
    token_arguments,
)

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule`` on CUDA tensors. Nothing is
    read back.

    Args:
        request: K = V = 64 or 128, no gradients; every other option of the two ops is served.
        inputs: its arrays, shaped as :class:`kdacore.types.RecurrentInputs` says.

    Returns:
        ``o`` ``[B, T, HV, V]``, and the final state where the request asks for it:
        ``request.state_shape``, or the pool itself where states are updated in place.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    plan = plan_of(request)
    addresses, strides, kept = token_arguments(inputs, request.scalar_gate, plan.strides)
    _, _, v, _, _, A_log, bias, initial, cu_seqlens, _, indices, accepted, out, has_initial, _, pool = inputs
    o: Any = out
    if out is None:
        o = torch.empty_like(v) if not kept else v.new_empty(plan.o_shape)
    elif not out.is_contiguous() or out.data_ptr() % ALIGNMENT:
        o = v.new_empty(plan.o_shape)
        if request.packed:
            o.copy_(out)  # rows that belong to no sequence are not written
    source, source_row = contiguous_rows(initial, plan.state_row)
    written, written_row = source, source_row
    if not request.inplace_state:
        written, written_row = None, plan.state_row
        if request.output_final_state:
            written = o.new_empty(request.state_shape, dtype=plan.state_dtype)
    elif pool is not None:
        written, written_row = contiguous_rows(pool, plan.state_row)
    A_log_at = bias_at = 0
    if A_log is not None:
        A_log = A_log if A_log.is_contiguous() else A_log.contiguous()
        A_log_at = A_log.data_ptr()
    if bias is not None:
        bias = bias if bias.is_contiguous() else bias.contiguous()
        bias_at = bias.data_ptr()
        if bias_at % ALIGNMENT:
            bias = bias.clone()
            bias_at = bias.data_ptr()
    source_at, written_at = address(source), address(written)
    indices, has_initial = contiguous(indices), contiguous(has_initial)
    cu_seqlens, accepted = contiguous(cu_seqlens), contiguous(accepted)
    named = plan.written_indices
    writes = indices if named == "state_indices" else contiguous(getattr(inputs, named)) if named else None
    size = plan.state_size
    aligned_states = (source_at | source_row * size | written_at | written_row * size) % ALIGNMENT == 0
    torch_launch.run(
        *(sequence_of(request, strides, (source_row, written_row), aligned_states), plan.arch, o),
        *addresses,
        *(A_log_at, bias_at, address(cu_seqlens), o.data_ptr()),
        *(source_at, written_at, address(indices), address(accepted), address(has_initial), address(writes)),
    )
    del kept  # copies live until the launch is queued; the allocator reuses them in stream order
    if out is not None and o is not out:
        o = out.copy_(o)
    if request.inplace_state:
        given: Any = initial if pool is None else pool
        if written is not given:
            given.copy_(written)
            written = given
    return Outputs(o, written if request.output_final_state else None)
