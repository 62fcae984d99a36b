"""Host side of the chunk forward: ``chunk_kda`` in one fused launch, in segments where there are few
heads, or in two launches side by side between the two; calls that keep what their backward would recompute
in launches of that backward."""

from __future__ import annotations

import secrets
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.architectures import build_arch
from kdacore_cuda.forms.dataflow import forward as chunk_forward_dataflow
from kdacore_cuda.forms.dataflow.kernels import use_dataflow
from kdacore_cuda.forms.fused.checkpoints import finish_checkpoints, make_marks
from kdacore_cuda.forms.fused.kernels import (
    are_many_short,
    chunk_forward_kernel,
    chunk_forward_shared_bytes,
    chunk_forward_threads,
    cluster_size,
    cut_states_size,
    has_hopper_kernel,
    helped_chunks_size,
    helper_clusters,
    resident_clusters,
)
from kdacore_cuda.forms.kept import forward as chunk_forward_kept
from kdacore_cuda.forms.kept.sizes import keeps
from kdacore_cuda.forms.segments import forward as chunk_forward_segments
from kdacore_cuda.forms.segments.kernels import use_segments
from kdacore_cuda.kernel_parameters import CHUNK_FORWARD, GATES, TYPES
from kdacore_cuda.request_encoding import (
    chunk_flags,
    contiguous_token_strides,
    has_bounded_gate,
    items_for_choice,
    type_code,
)
from kdacore_cuda.runtime.device_figures import clusters_at_once, memory_rate_of, multiprocessors_of
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
    """Float32 numbers for the states of sequences that two clusters share, or for the chunks that helpers prepare; 0
    without either."""
    arch: str
    strides: tuple[int, ...]
    """Of contiguous q, k, v, g and beta."""
    sizes: tuple[Any, ...]
    """The parameters after the strides."""
    state_dtype: Any
    widen_gate: bool
    """g is float16, which the kernel takes as float32."""
    in_dataflow: bool
    """The call is served by :mod:`kdacore_cuda.forms.dataflow.forward`."""
    in_segments: bool
    """The call is served by :mod:`kdacore_cuda.forms.segments.forward`."""


def _make_plan(r: Request) -> ChunkForwardPlan:
    arch = build_arch(r.device.arch)
    items, multiprocessors = r.N * r.HV, multiprocessors_of(r)
    gates = has_bounded_gate(r), type_code(r, "g") != TYPES["bfloat16"]
    hopper = has_hopper_kernel(r.K, arch)
    in_dataflow = (
        hopper
        and chunk_forward_dataflow.serves(r)
        and use_dataflow(items_for_choice(r), gates[0], multiprocessors)
    )
    in_segments = (
        hopper
        and not in_dataflow
        and use_segments(items_for_choice(r), gates[0], multiprocessors, lambda: memory_rate_of(r))
    )

    def at_once(cluster: int) -> int:
        if in_dataflow or in_segments:  # no need to load a kernel that the call does not use
            return 0
        return clusters_at_once(r, _launcher(r.K, cluster, *gates, arch), arch)

    # On Hopper clusters of every size give the same bits.
    chosen_by = items if hopper else items_for_choice(r)
    cluster = cluster_size(r.K, chosen_by, r.B * r.T // max(r.N, 1), multiprocessors, arch, at_once)
    clusters = resident_clusters(r.K, cluster, items, multiprocessors, arch, at_once)
    looks_up = r.packed or r.has("state_indices") or r.checkpoint_every or r.checkpoint_count
    many_short = hopper and not looks_up and are_many_short(r.T, items, cluster, clusters)
    helpers = 0
    # Helpers and the blocks that wait for them count steps by T, so no sequence may be shorter or padding.
    if hopper and not (clusters or r.packed or r.has("state_indices")):
        helpers = helper_clusters(items, r.T, cluster, gates[0], multiprocessors, at_once)
    workspace_size = 0
    if clusters and not many_short:
        # Whether a sequence is cut in two depends on lengths and null slots, which only the device knows.
        workspace_size = cut_states_size(clusters)
    elif helpers:
        workspace_size = helped_chunks_size(r.T, items)
    return ChunkForwardPlan(
        launcher=_launcher(r.K, cluster, *gates, arch, many_short, helpers > 0),
        grid=(helpers + (clusters or items)) * cluster,
        workspace_size=workspace_size,
        arch=arch,
        strides=contiguous_token_strides(r),
        sizes=(
            r.T,
            r.N,
            r.H,
            r.HV,
            clusters,
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
        in_dataflow=in_dataflow,
        in_segments=in_segments,
    )


plan_of = PlanCache(_make_plan)


def keeps_segments(request: Request) -> bool:
    """Whether a call for which :func:`kdacore_cuda.forms.kept.sizes.keeps` is false keeps what
    :mod:`kdacore_cuda.forms.segments.saved` says."""
    return plan_of(request).in_segments and chunk_forward_segments.plan_of(request).keeps


@cache
def _launcher(
    K: int,
    cluster: int,
    bounded: bool,
    float_gate: bool,
    arch: str,
    many_short: bool = False,
    helped: bool = False,
) -> Launcher:
    return Launcher(
        chunk_forward_kernel(K, cluster, bounded, float_gate, arch, many_short, helped),
        CHUNK_FORWARD,
        chunk_forward_threads(K, cluster, arch),
        chunk_forward_shared_bytes(K, cluster, bounded, arch),
    )


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` on CUDA tensors. Nothing is read back from the device.

    Args:
        request: bfloat16 q, k and v, K = V = 64 or 128.
        inputs: its arrays, shaped as :class:`kdacore.types.ChunkInputs` says.

    Returns:
        ``o`` ``[B, T, HV, V]``; the final state (``request.state_shape``, or the pool itself where
        states are written in place) and the checkpoints (``request.checkpoint_shape``) where the
        request asks for them; what :mod:`kdacore_cuda.forms.kept.sizes` or
        :mod:`kdacore_cuda.forms.segments.saved` says in ``saved``.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    if keeps(request):
        return chunk_forward_kept.forward(request, inputs)
    plan = plan_of(request)
    if plan.in_dataflow:
        return chunk_forward_dataflow.forward(request, inputs)
    if plan.in_segments:
        return chunk_forward_segments.forward(request, inputs)
    if plan.widen_gate:
        inputs = inputs._replace(g=inputs.g.float())
    addresses, strides, kept = token_arguments(inputs, False, plan.strides)
    A_log, bias, cu_seqlens = map(contiguous, (inputs.A_log, inputs.dt_bias, inputs.cu_seqlens))
    pools = pool_arguments(request, inputs, plan.state_dtype)
    o = pools.o
    checkpoints = chunk_forward_segments.make_checkpoints(request, o, plan.state_dtype)
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
