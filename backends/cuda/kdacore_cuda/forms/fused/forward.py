"""Host side of the fused form: ``chunk_kda`` in one launch, and one behind it for checkpoints between steps."""

from __future__ import annotations

import secrets
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.architectures import has_hopper_kernel
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.fused.checkpoints import finish_checkpoints, make_checkpoints, make_marks
from kdacore_cuda.forms.fused.kernels import chunk_forward_launcher
from kdacore_cuda.forms.fused.sizes import grid_blocks, workspace_size
from kdacore_cuda.kernel_parameters import GATES, TYPES
from kdacore_cuda.request_encoding import chunk_flags, contiguous_token_strides, has_bounded_gate, type_code
from kdacore_cuda.runtime.device_figures import arch_of
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.pool_arguments import pool_arguments, returned
from kdacore_cuda.runtime.torch_arguments import address, contiguous, token_arguments, torch_dtype

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:  # plans are made for JAX too, where torch need not be installed
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")

LAUNCH_NUMBERS = count(secrets.randbits(62))
"""A different number for every launch, which uninitialised memory does not hold by chance. Flags in
device memory count as raised when they hold it."""


class ChunkForwardPlan(NamedTuple):
    """What the request alone determines."""

    launcher: Launcher
    grid: int
    workspace_size: int
    """Float32 numbers (:func:`kdacore_cuda.forms.fused.sizes.workspace_size`)."""
    arch: str
    strides: tuple[int, ...]
    """Of contiguous q, k, v, g and beta."""
    sizes: tuple[Any, ...]
    """The parameters after the strides."""
    state_dtype: Any
    widen_gate: bool
    """g is float16, which the kernel takes as float32."""


def _make_plan(r: Request) -> ChunkForwardPlan:
    arch, clusters = arch_of(r), chosen(r).clusters
    if clusters is None:
        raise ValueError(f"{r.op}: another form serves this call")
    gates = has_bounded_gate(r), type_code(r, "g") != TYPES["bfloat16"]
    return ChunkForwardPlan(
        launcher=chunk_forward_launcher(
            r.K, clusters.size, *gates, arch, clusters.many_short, clusters.preparing > 0
        ),
        grid=grid_blocks(clusters, r.N * r.HV),
        workspace_size=workspace_size(r, clusters),
        arch=arch,
        strides=contiguous_token_strides(r),
        sizes=(
            r.T,
            r.N,
            r.H,
            r.HV,
            clusters.resident,
            r.checkpoint_every,
            r.null_index,
            r.checkpoint_count,
            GATES[r.gate],
            chunk_flags(r),
            type_code(r, "beta"),
            type_code(r, "dt_bias"),
            r.scale,
            r.lower_bound or 0.0,
        ),
        state_dtype=torch_dtype(r, r.state_dtype),
        widen_gate=type_code(r, "g") == TYPES["float16"],
    )


plan_of = PlanCache(_make_plan)


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` on CUDA tensors in this form: arguments, results and errors as of
    :func:`kdacore_cuda.forms.chunk_forward.forward`."""
    plan = plan_of(request)
    if plan.widen_gate:
        inputs = inputs._replace(g=inputs.g.float())
    addresses, strides, kept = token_arguments(inputs, False, plan.strides)
    A_log, bias, cu_seqlens = map(contiguous, (inputs.A_log, inputs.dt_bias, inputs.cu_seqlens))
    pools = pool_arguments(request, inputs, plan.state_dtype)
    o = pools.o
    checkpoints = make_checkpoints(request, o, plan.state_dtype)
    marks = make_marks(request, inputs, o, has_hopper_kernel(request.K, plan.arch))
    workspace = o.new_empty(plan.workspace_size, dtype=torch.float32) if plan.workspace_size else None
    values = (
        *addresses,
        *(address(A_log), address(bias), address(cu_seqlens), o.data_ptr()),
        *(address(pools.initial), address(pools.written), address(checkpoints), address(workspace)),
        *(*pools.rows, *marks.addresses, next(LAUNCH_NUMBERS), *pools.strides),
        *strides,
        *plan.sizes,
    )
    torch_launch.launch(plan.launcher, plan.grid, plan.arch, o, values)
    g_type = str(inputs.g.dtype).removeprefix("torch.")  # where it was widened, not the request's
    finish_checkpoints(request, plan.arch, values, pools, marks, g_type)
    del kept  # copies live until the launch is queued
    return Outputs(*returned(request, inputs, pools), checkpoints)
