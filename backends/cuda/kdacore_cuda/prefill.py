"""Host side of the fused prefill kernel: torch tensors in, one launch, nothing read back."""

from __future__ import annotations

import secrets
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import runtime, segments
from kdacore_cuda.arrays import (
    Plans,
    build_arch,
    chunk_flags,
    contiguous_strides,
    flat,
    pointer,
    rows,
    spec_type,
)
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import CHUNK_FORWARD, GATES, TYPES
from kdacore_cuda.prefill_kernels import (
    cluster_size,
    hand_over_size,
    has_own,
    may_cut,
    prefill_kernel,
    prefill_shared,
    prefill_threads,
    sharing_clusters,
)
from kdacore_cuda.segment_kernels import pays
from kdacore_cuda.verifiers import is_safe

LAUNCHES = count(secrets.randbits(62))
"""A number for every launch that memory does not hold by chance."""


@cache
def _launcher(K: int, cluster: int, safe: bool, float_gate: bool, arch: str) -> Launcher:
    kernel = prefill_kernel(K, cluster, safe, float_gate, arch)
    return Launcher(
        kernel, CHUNK_FORWARD, prefill_threads(K, cluster, arch), prefill_shared(K, cluster, safe, arch)
    )


class _Plan(NamedTuple):
    launcher: Launcher
    grid: int
    hand_over: int
    """Float32 numbers of what clusters hand on to each other, 0 if no sequence is cut."""
    arch: str
    strides: tuple[int, ...]
    sizes: tuple[Any, ...]
    """What follows the strides in the parameters."""
    state_dtype: Any
    widen_gate: bool
    """g is float16, which the kernel takes as float32."""
    segmented: bool
    """Few heads, whose sequences are cut; see :mod:`kdacore_cuda.segments`."""


def _make_plan(r: Request) -> _Plan:
    arch = build_arch(r.device.arch)
    float_gate = spec_type(r, "g") != TYPES["bfloat16"]
    items, processors = r.N * r.HV, runtime.processors(r.device.index)
    cluster = cluster_size(r.K, items, processors, arch)
    clusters = sharing_clusters(r.K, cluster, items, processors, arch)
    cuts = clusters and (r.packed or may_cut(r.T, items, clusters))
    types = (spec_type(r, "beta"), spec_type(r, "dt_bias"))
    return _Plan(
        launcher=_launcher(r.K, cluster, is_safe(r), float_gate, arch),
        grid=(clusters or items) * cluster,
        hand_over=hand_over_size(clusters) if cuts else 0,
        arch=arch,
        strides=contiguous_strides(r),
        sizes=(
            r.T,
            r.N,
            r.H,
            r.HV,
            clusters,
            r.checkpoint_every,
            GATES[r.gate],
            chunk_flags(r),
            *types,
            r.scale,
            r.lower_bound or 0.0,
        ),
        state_dtype=getattr(torch, r.state_dtype),
        widen_gate=spec_type(r, "g") == TYPES["float16"],
        segmented=has_own(r.K, arch) and pays(items, processors),
    )


plan_of = Plans(_make_plan)


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """``chunk_kda`` without gradients on CUDA tensors, bfloat16 q, k, v.

    Sizes as in the contract; see :class:`kdacore.types.ChunkInputs`. Raises BackendBuildError or DriverError.
    """
    plan = plan_of(request)
    if plan.segmented:
        return segments.forward(request, inputs)
    if plan.widen_gate:
        inputs = inputs._replace(g=inputs.g.float())
    pointers, strides, kept = rows(inputs, False, plan.strides)
    A_log, bias, cu_seqlens = flat(inputs.A_log), flat(inputs.dt_bias), flat(inputs.cu_seqlens)
    h0 = flat(inputs.initial_state)
    o = inputs.v.new_empty((request.B, request.T, request.HV, request.V))
    ht = o.new_empty(request.state_shape, dtype=plan.state_dtype) if request.output_final_state else None
    ckpt = segments.checkpoints(request, o, plan.state_dtype)
    handed = o.new_empty(plan.hand_over, dtype=torch.float32) if plan.hand_over else None
    values = (
        *pointers,
        *(pointer(A_log), pointer(bias), pointer(cu_seqlens), o.data_ptr()),
        *(pointer(h0), pointer(ht), pointer(ckpt), pointer(handed), next(LAUNCHES)),
        *strides,
        *plan.sizes,
    )
    runtime.launch(plan.launcher, plan.grid, plan.arch, o, values)
    del kept  # copies live until the launch is queued
    return Outputs(o, ht, ckpt)
