"""The choice for a request with the figures of its device: what launch code reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kdacore.types import Request
from kdacore_cuda.choice import Choice, Figures, choose
from kdacore_cuda.forms.chunk_numbers import gates_of
from kdacore_cuda.runtime import device_figures
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_cuda.runtime.plan_cache import FamilyCache, PlanCache


def figures_of(r: Request) -> Figures:
    """Figures of a request's device. Of those that a call's form does not depend on, none is asked for."""
    arch = device_figures.arch_of(r)

    def clusters_at_once(cluster: int) -> int:
        return device_figures.clusters_at_once(r, _fused_kernels(r)(cluster, arch), arch)

    chunk = r.op in ("chunk_kda", "chunk_gated_delta_rule")
    count = device_figures.multiprocessors_of(r) if chunk else 0
    return Figures(arch, count, clusters_at_once, lambda: device_figures.memory_rate_of(r))


def _kernels(r: Request) -> Callable[[int, str], Kernel]:
    """The fused kernel for the calls of a family, by the size of a cluster and the architecture."""
    from kdacore_cuda.forms.fused.kernels import chunk_forward_kernel  # here: most calls need it not

    K, (float_gate, bounded) = r.K, gates_of(r)
    return cache(lambda cluster, arch: chunk_forward_kernel(K, cluster, bounded, float_gate, arch))


_fused_kernels = FamilyCache(_kernels)
chosen: PlanCache[Choice] = PlanCache(lambda r: choose(r, figures_of(r)))
"""``chosen(request)``: what serves it on its device."""
