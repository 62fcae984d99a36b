"""The training stages ``kda_chunk_intra`` and ``kda_recompute_w_u`` on torch tensors: one launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdacore.lazy import lazy_module
from kdacore.types import IntraInputs, IntraOutputs, RecomputeInputs, RecomputeOutputs, Request
from kdacore_cuda.forms.stages.launches import sequence_of
from kdacore_cuda.forms.stages.sizes import plan_of
from kdacore_cuda.runtime.torch_arguments import address, aligned, contiguous

if TYPE_CHECKING:
    import torch

    from kdacore_cuda.runtime import torch_launch
else:
    torch, torch_launch = lazy_module("torch"), lazy_module("kdacore_cuda.runtime.torch_launch")


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
    r = request
    q, k, gc = aligned(inputs.q), aligned(inputs.k), aligned(inputs.gc)
    beta, cu_seqlens = inputs.beta, contiguous(inputs.cu_seqlens)
    Aqk = q.new_empty((r.B, r.T, r.HV, r.chunk_size))
    Akk = torch.empty_like(Aqk)
    torch_launch.run(
        *(sequence_of(r, _strides(q, k, gc, beta)), plan_of(r).arch, Aqk),
        *(q.data_ptr(), k.data_ptr(), gc.data_ptr(), beta.data_ptr(), address(cu_seqlens)),
        *(Aqk.data_ptr(), Akk.data_ptr()),
    )
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
    r = request
    k, v, gc = aligned(inputs.k), aligned(inputs.v), aligned(inputs.gc)
    Akk = aligned(inputs.Akk)
    q = None if inputs.q is None else aligned(inputs.q)
    beta, cu_seqlens = inputs.beta, contiguous(inputs.cu_seqlens)
    w = k.new_empty((r.B, r.T, r.HV, r.K))
    u, kg = k.new_empty((r.B, r.T, r.HV, r.V)), torch.empty_like(w)
    qg = None if q is None else torch.empty_like(w)
    torch_launch.run(
        *(sequence_of(r, _strides(k, v, beta, gc, Akk, k if q is None else q)), plan_of(r).arch, w),
        *(k.data_ptr(), v.data_ptr(), beta.data_ptr(), gc.data_ptr(), Akk.data_ptr(), address(q)),
        *(address(cu_seqlens), w.data_ptr(), u.data_ptr(), kg.data_ptr(), address(qg)),
    )
    return RecomputeOutputs(w, u, kg, qg)
