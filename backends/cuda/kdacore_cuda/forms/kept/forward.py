"""Host side of the chunk forward that keeps what its backward would recompute
(:mod:`kdacore_cuda.forms.kept.sizes`), in two launches: prepare, and states with outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdacore.lazy import lazy_module
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward.kernels import (
    ChunkBackwardKernel,
    one_way_warpgroups,
    prepare_kernel,
    scan_outputs_kernel,
)
from kdacore_cuda.forms.kept.sizes import kept_arrays, kept_bytes
from kdacore_cuda.request_encoding import items_for_choice
from kdacore_cuda.runtime.device_figures import multiprocessors_of

if TYPE_CHECKING:
    import torch
else:  # chunk_forward imports this for calls from JAX too, where torch need not be installed
    torch = lazy_module("torch")


def outputs_kernel(request: Request) -> ChunkBackwardKernel:
    """The second launch of this call."""
    return scan_outputs_kernel(one_way_warpgroups(items_for_choice(request), multiprocessors_of(request)))


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` of a call for which :attr:`kdacore_cuda.choice.Choice.form` is ``kept``.

    Args:
        request: bfloat16 q, k, v, K = V = 128.
        inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says.

    Returns:
        ``o`` ``[B, T, HV, V]``, the final state (``request.state_shape``) where the request asks for
        it, and in ``saved`` one buffer of bytes.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    r, plan = request, chunk_backward.plan_of(request)
    x = inputs._replace(g=inputs.g.float()) if inputs.g.dtype == torch.float16 else inputs
    units = plan.sizes["units"]
    kept = x.q.new_empty(kept_bytes(units), dtype=torch.uint8)
    o = x.v.new_empty((r.B, r.T, r.HV, r.V))
    final = None
    if r.output_final_state:
        final = x.v.new_empty(r.state_shape, dtype=getattr(torch, r.state_dtype))
    arrays = kept_arrays(kept, units) | chunk_backward.given_arrays(o=o, ht=final)
    for kernel in (prepare_kernel(plan.float_gate, plan.bounded), outputs_kernel(r)):
        chunk_backward.launch(kernel, plan, x, arrays)
    return Outputs(o, final, None, (kept,))
