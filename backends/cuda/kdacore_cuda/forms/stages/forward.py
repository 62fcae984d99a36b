"""The training stages ``kda_chunk_intra`` and ``kda_recompute_w_u`` on torch tensors: one launch each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kdacore.types import IntraInputs, IntraOutputs, RecomputeInputs, RecomputeOutputs, Request
from kdacore_cuda.forms.stages.launches import launches_of
from kdacore_cuda.runtime import torch_launch
from kdacore_cuda.runtime.plan_cache import PlanCache
from kdacore_cuda.runtime.program import Program
from kdacore_cuda.runtime.torch_arguments import aligned, contiguous


def _pack(r: Request, strides: tuple[int, ...]) -> tuple[Program, bytes, str]:
    made = launches_of(r, strides)
    return made.program, made.program.pack_numbers(made.numbers), made.arch


_packed = PlanCache(_pack)
"""Program, numbers and architecture, by the strides of the arrays."""


def _run(r: Request, arrays: Mapping[str, torch.Tensor | None], strided: tuple[torch.Tensor, ...]) -> None:
    """``strided``: those whose strides the kernel takes, in order."""
    program, numbers, arch = _packed(r, tuple([s for x in strided for s in x.stride()[:3]]))
    torch_launch.run(program, numbers, arch, strided[0], arrays)


def chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """``Aqk`` and ``Akk`` ``[B, T, HV, 64]`` in the dtype of q: see :func:`kdacore.stages.kda_chunk_intra`.

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
    arrays = {"q": q, "k": k, "gc": gc, "beta": beta, "cu_seqlens": cu_seqlens, "Aqk": Aqk, "Akk": Akk}
    _run(r, arrays, (q, k, gc, beta))
    return IntraOutputs(Aqk, Akk)


def recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """``w``, ``u``, ``kg`` and, with q, ``qg`` in the dtype of k: see :func:`kdacore.stages.kda_recompute_w_u`.

    Arguments and errors as of :func:`chunk_intra`; V is 64 or 128, too. Of Akk only the lower triangle counts.
    """
    r = request
    k, v, gc = aligned(inputs.k), aligned(inputs.v), aligned(inputs.gc)
    Akk = aligned(inputs.Akk)
    q = None if inputs.q is None else aligned(inputs.q)
    beta, cu_seqlens = inputs.beta, contiguous(inputs.cu_seqlens)
    w = k.new_empty((r.B, r.T, r.HV, r.K))
    u, kg = k.new_empty((r.B, r.T, r.HV, r.V)), torch.empty_like(w)
    qg = None if q is None else torch.empty_like(w)
    given = {"k": k, "v": v, "beta": beta, "gc": gc, "Akk": Akk, "q": q, "cu_seqlens": cu_seqlens}
    _run(r, given | {"w": w, "u": u, "kg": kg, "qg": qg}, (k, v, beta, gc, Akk, k if q is None else q))
    return RecomputeOutputs(w, u, kg, qg)
