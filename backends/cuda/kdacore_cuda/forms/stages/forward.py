"""Host side of the training stages ``kda_chunk_intra`` and ``kda_recompute_w_u``: one launch
each."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import IntraInputs, IntraOutputs, RecomputeInputs, RecomputeOutputs, Request
from kdacore_cuda.forms.chosen import chosen
from kdacore_cuda.forms.stages.kernels import (
    STAGE_THREADS,
    hopper_recompute_kernel,
    intra_kernel,
    intra_shared_bytes,
    recompute_grid,
    recompute_kernel,
    recompute_shared_bytes,
)
from kdacore_cuda.kernel_parameters import FLAGS, INTRA, RECOMPUTE
from kdacore_cuda.request_encoding import is_int64, type_code
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.launcher import Launcher
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.torch_arguments import address, aligned, contiguous

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:  # plans are made for JAX too, where torch need not be installed
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")


class StagePlan(NamedTuple):
    """What the request of a stage alone determines."""

    launcher: Launcher
    grid: int
    arch: str
    sizes: tuple[Any, ...]
    """The parameters after the strides."""


def _make_plan(r: Request) -> StagePlan:
    float16, arch = r.dtype == "float16", arch_of(r)
    sizes: tuple[Any, ...] = (
        *(r.T, r.N, r.H, r.HV, r.num_chunks),
        *(FLAGS["CU64"] * is_int64(r, "cu_seqlens"), type_code(r, "beta")),
    )
    items = (1 if r.packed else r.B) * r.num_chunks * r.HV
    if r.op == "kda_chunk_intra":
        return StagePlan(_intra_launcher(r.K, float16), items, arch, (*sizes, r.scale))
    if not chosen(r).own_recompute:
        return StagePlan(_recompute_launcher(r.K, r.V, float16), items, arch, (*sizes, 0, 0, 0))
    # A pack has a slot for every chunk its tokens could fill; on average half of the sequences fill
    # their last one.
    empty = (r.num_chunks - -(-r.T // r.chunk_size)) // 2 * r.HV if r.packed else 0
    d = recompute_grid(items, multiprocessors_of(r), empty, r.has("q"))
    launcher = _hopper_recompute_launcher(float16, r.has("q"), d.shared)
    return StagePlan(launcher, d.grid, arch, (*sizes, d.whole, d.staggered, d.first_in_l2))


plan_of = PlanCache(_make_plan)


@cache
def _intra_launcher(K: int, float16: bool) -> Launcher:
    return Launcher(intra_kernel(K, float16), INTRA, STAGE_THREADS, intra_shared_bytes(K))


@cache
def _recompute_launcher(K: int, V: int, float16: bool) -> Launcher:
    return Launcher(recompute_kernel(K, V, float16), RECOMPUTE, STAGE_THREADS, recompute_shared_bytes(K, V))


@cache
def _hopper_recompute_launcher(float16: bool, with_q: bool, shared: int) -> Launcher:
    return Launcher(hopper_recompute_kernel(float16, with_q), RECOMPUTE, STAGE_THREADS, shared)


def _strides(*arrays: torch.Tensor) -> tuple[int, ...]:
    """Batch, token and head stride of each, in elements."""
    return tuple(s for x in arrays for s in x.stride()[:3])


def chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """``Aqk`` and ``Akk`` ``[B, T, HV, 64]`` in the dtype of q: see
    :func:`kdacore.stages.kda_chunk_intra`.

    Args:
        request: 16-bit q and k, K = 64 or 128, chunks of 64 tokens.
        inputs: its arrays, shaped as :class:`kdacore.types.IntraInputs` says.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    r, plan = request, plan_of(request)
    q, k, gc = aligned(inputs.q), aligned(inputs.k), aligned(inputs.gc)
    beta, cu_seqlens = inputs.beta, contiguous(inputs.cu_seqlens)
    Aqk = q.new_empty((r.B, r.T, r.HV, r.chunk_size))
    Akk = torch.empty_like(Aqk)
    values = (
        *(q.data_ptr(), k.data_ptr(), gc.data_ptr(), beta.data_ptr(), address(cu_seqlens)),
        *(Aqk.data_ptr(), Akk.data_ptr()),
        *_strides(q, k, gc, beta),
        *plan.sizes,
    )
    torch_launch.launch(plan.launcher, plan.grid, plan.arch, Aqk, values)
    return IntraOutputs(Aqk, Akk)


def recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """``w``, ``u``, ``kg`` and, with q, ``qg`` in the dtype of k: see
    :func:`kdacore.stages.kda_recompute_w_u`.

    Args:
        request: 16-bit q, k, v and Akk, K and V of 64 or 128, chunks of 64 tokens.
        inputs: its arrays, shaped as :class:`kdacore.types.RecomputeInputs` says. Of Akk only the
            lower triangle counts.

    Raises:
        BackendBuildError: a kernel had to be compiled and could not be.
        DriverError: the driver refused a launch.
    """
    r, plan = request, plan_of(request)
    k, v, gc = aligned(inputs.k), aligned(inputs.v), aligned(inputs.gc)
    Akk = aligned(inputs.Akk)
    q = None if inputs.q is None else aligned(inputs.q)
    beta, cu_seqlens = inputs.beta, contiguous(inputs.cu_seqlens)
    w = k.new_empty((r.B, r.T, r.HV, r.K))
    u, kg = k.new_empty((r.B, r.T, r.HV, r.V)), torch.empty_like(w)
    qg = None if q is None else torch.empty_like(w)
    values = (
        *(k.data_ptr(), v.data_ptr(), beta.data_ptr(), gc.data_ptr(), Akk.data_ptr(), address(q)),
        *(address(cu_seqlens), w.data_ptr(), u.data_ptr(), kg.data_ptr(), address(qg)),
        *_strides(k, v, beta, gc, Akk, k if q is None else q),
        *plan.sizes,
    )
    torch_launch.launch(plan.launcher, plan.grid, plan.arch, w, values)
    return RecomputeOutputs(w, u, kg, qg)
