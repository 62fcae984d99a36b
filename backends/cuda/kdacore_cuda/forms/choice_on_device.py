"""The choice for a request with the figures of its device: what launch code reads."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.choice import Choice, Figures, choose
from kdacore_cuda.fitted_head_dims import kernel_request
from kdacore_cuda.forms.chunk_numbers import gates_of
from kdacore_cuda.forms.fused.kernels import chunk_forward_kernel
from kdacore_cuda.runtime import device_figures
from kdacore_cuda.runtime.plan_cache import PlanCache


def figures_of(r: Request) -> Figures:
    """Figures of a request's device. Of those that a call's form does not depend on, none is asked for."""
    arch = device_figures.arch_of(r)

    def clusters_at_once(cluster: int) -> int:
        float_gate, bounded = gates_of(r)
        kernel = chunk_forward_kernel(kernel_request(r).K, cluster, bounded, float_gate, arch)
        return device_figures.clusters_at_once(r, kernel, arch)

    counts = r.op.startswith(("chunk_", "fused_decode_"))
    count = device_figures.multiprocessors_of(r) if counts else 0
    return Figures(arch, count, clusters_at_once, lambda: device_figures.memory_rate_of(r))


chosen: PlanCache[Choice] = PlanCache(lambda r: choose(r, figures_of(r)))
"""``chosen(request)``: what serves it on its device."""
