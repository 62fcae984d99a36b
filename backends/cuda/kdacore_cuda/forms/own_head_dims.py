"""Which calls of ``chunk_kda`` with head dims other than 128 kernels serve without copies: csrc/sm90/head_dims.cuh.

These are calls from torch, on Hopper, of the fused form, of saving_forward, and of the backward whose scan walks whole
sequences. Segments, two launches side by side, and JAX's programs have kernels for K = V = 128 alone, which serve
others on filled-up copies (:mod:`kdacore_cuda.fitted_head_dims`).
"""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.architectures import has_hopper_kernel
from kdacore_cuda.fitted_head_dims import SECTOR, SIZE, is_fitted
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.runtime.device_figures import arch_of

FORMS = frozenset({"fused", "saving_forward"})
"""Those with kernels for other head dims."""


def is_narrow(r: Request) -> bool:
    """Whether heads have other dims than those that kernels compute with."""
    return not r.K == r.V == SIZE


def _may_serve(r: Request) -> bool:
    own_dims = r.K % SECTOR == 0 and r.V % SECTOR == 0
    return r.op == "chunk_kda" and r.kind == "torch" and own_dims


def serves_forward(r: Request) -> bool:
    """Whether a forward that would be filled up reads and writes a call's arrays as they are."""
    if not (_may_serve(r) and is_fitted(r)) or chosen(r).form not in FORMS:
        return False
    return chosen(r).form != "fused" or has_hopper_kernel(SIZE, arch_of(r))


def serves_backward(r: Request) -> bool:
    """The same of a backward."""
    if not _may_serve(r):
        return False
    choice = chosen(r)
    return not choice.backward_in_segments and choice.saves != "maps"
