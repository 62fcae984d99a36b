"""Host side of the training stages: torch tensors in, one launch each, nothing read back."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from kdacore.types import IntraInputs, IntraOutputs, RecomputeInputs, RecomputeOutputs, Request
from kdacore_cuda import runtime
from kdacore_cuda.arrays import Plans, aligned, build_arch, flat, is_wide, pointer, spec_type
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import FLAGS, INTRA, RECOMPUTE
from kdacore_cuda.recompute_kernels import THREADS, divide, hopper_kernel, serves
from kdacore_cuda.variants import (
    STAGE_THREADS,
    intra_kernel,
    intra_shared,
    recompute_kernel,
    recompute_shared,
)


@cache
def _intra_launcher(K: int, float16: bool) -> Launcher:
    return Launcher(intra_kernel(K, float16), INTRA, STAGE_THREADS, intra_shared(K))


@cache
def _recompute_launcher(K: int, V: int, float16: bool) -> Launcher:
    return Launcher(recompute_kernel(K, V, float16), RECOMPUTE, STAGE_THREADS, recompute_shared(K, V))


@cache
def _hopper_launcher(float16: bool, with_q: bool, shared: int) -> Launcher:
    return Launcher(hopper_kernel(float16, with_q), RECOMPUTE, THREADS, shared)


class _Plan(NamedTuple):
    launcher: Launcher
    grid: int
    arch: str
    sizes: tuple[Any, ...]
    """What follows the strides in the parameters."""


def _make_plan(r: Request) -> _Plan:
    float16, arch = r.dtype == "float16", build_arch(r.device.arch)
    sizes: tuple[Any, ...] = (
        *(r.T, r.N, r.H, r.HV, r.num_chunks),
        *(FLAGS["CU64"] * is_wide(r, "cu_seqlens"), spec_type(r, "beta")),
    )
    items = (1 if r.packed else r.B) * r.num_chunks * r.HV
    if r.op == "kda_chunk_intra":
        return _Plan(_intra_launcher(r.K, float16), items, arch, (*sizes, r.scale))
    if not serves(r.K, r.V, arch):
        return _Plan(_recompute_launcher(r.K, r.V, float16), items, arch, (*sizes, 0, 0, 0))
    # A pack's slots are as many as its tokens could fill; half the sequences' ends, at a guess, fill one more.
    empty = (r.num_chunks - -(-r.T // r.chunk_size)) // 2 * r.HV if r.packed else 0
    d = divide(items, runtime.processors(r.device.index), empty, r.has("q"))
    launcher = _hopper_launcher(float16, r.has("q"), d.shared)
    return _Plan(launcher, d.grid, arch, (*sizes, d.whole, d.in_turn, d.kept))


_plan_of = Plans(_make_plan)


def _strides(*arrays: torch.Tensor) -> tuple[int, ...]:
    """Batch, token and head stride of each, in elements."""
    return tuple(s for x in arrays for s in x.stride()[:3])


def chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """``Aqk`` and ``Akk`` ``[B, T, HV, 64]`` in the dtype of q: see :func:`kdacore.stages.kda_chunk_intra`.

    Raises BackendBuildError or DriverError.
    """
    r, plan = request, _plan_of(request)
    q, k, gc = aligned(inputs.q), aligned(inputs.k), aligned(inputs.gc)
    beta, cu_seqlens = inputs.beta, flat(inputs.cu_seqlens)
    Aqk = q.new_empty((r.B, r.T, r.HV, r.chunk_size))
    Akk = torch.empty_like(Aqk)
    values = (
        *(q.data_ptr(), k.data_ptr(), gc.data_ptr(), beta.data_ptr(), pointer(cu_seqlens)),
        *(Aqk.data_ptr(), Akk.data_ptr()),
        *_strides(q, k, gc, beta),
        *plan.sizes,
    )
    runtime.launch(plan.launcher, plan.grid, plan.arch, Aqk, values)
    return IntraOutputs(Aqk, Akk)


def recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """``w``, ``u``, ``kg`` and, with q, ``qg`` in the dtype of k: see :func:`kdacore.stages.kda_recompute_w_u`.

    Akk is taken for lower triangular, as the inverse is. Raises BackendBuildError or DriverError.
    """
    r, plan = request, _plan_of(request)
    k, v, gc = aligned(inputs.k), aligned(inputs.v), aligned(inputs.gc)
    Akk = aligned(inputs.Akk)
    q = None if inputs.q is None else aligned(inputs.q)
    beta, cu_seqlens = inputs.beta, flat(inputs.cu_seqlens)
    w = k.new_empty((r.B, r.T, r.HV, r.K))
    u, kg = k.new_empty((r.B, r.T, r.HV, r.V)), torch.empty_like(w)
    qg = None if q is None else torch.empty_like(w)
    values = (
        *(k.data_ptr(), v.data_ptr(), beta.data_ptr(), gc.data_ptr(), Akk.data_ptr(), pointer(q)),
        *(pointer(cu_seqlens), w.data_ptr(), u.data_ptr(), kg.data_ptr(), pointer(qg)),
        *_strides(k, v, beta, gc, Akk, k if q is None else q),
        *plan.sizes,
    )
    runtime.launch(plan.launcher, plan.grid, plan.arch, w, values)
    return RecomputeOutputs(w, u, kg, qg)
