"""Which calls on a slice of a row that continues on other ranks have kernels of their own."""

from __future__ import annotations

from functools import partial

from kdacore.lazy import lazy_function
from kdacore.types import Request, SliceFunctions
from kdacore_cuda.architectures import has_hopper_kernel
from kdacore_cuda.runtime.device_figures import arch_of

_lazy = partial(lazy_function, "kdacore_cuda")  # calls from JAX do not need torch, nor the others JAX
_form = _lazy("forms.explain", "form_of_slice")
_forward, _backward = partial(_lazy, "forms.slices.forward"), partial(_lazy, "forms.slices.backward")
_OF_TORCH = SliceFunctions(
    *(_forward("begin"), _forward("finish")),
    *(_backward("backward_begin"), _backward("backward_finish")),
    form=_form,
)
_jax = partial(_lazy, "jax.slices")
_OF_JAX = SliceFunctions(
    _jax("begin"), _jax("finish"), _jax("backward_begin"), _jax("backward_finish"), form=_form
)


FORWARD_SECONDS, TRAINING_SECONDS = (30e-6, 1.60e-9), (80e-6, 6.15e-9)
"""Of a slice's work of ``chunk_kda``, fixed and for each token and value head: two H100s, 4 to 32 heads, packed or not
(benchmarks/results/h100-x2/context-parallel.json)."""
KEPT_TRAINING_SECONDS = 100e-6, 5.85e-9
"""The same where the backward takes maps from the forward: four H100s, 4 to 32 heads
(benchmarks/results/h100-x4/context-parallel.json)."""


def slice_functions(request: Request) -> SliceFunctions | None:
    """The functions that serve a slice by kernels for slices: on Hopper, with K = V = 128, for any number of heads;
    ``chunk_kda`` of bfloat16, the gated delta rule of float16, too. None elsewhere: such a slice is composed of whole
    calls."""
    if request.V != request.K or not has_hopper_kernel(request.K, arch_of(request)):
        return None
    if request.dtype != "bfloat16" and request.op == "chunk_kda":
        return None
    functions = _OF_JAX if request.kind == "jax" else _OF_TORCH
    if request.op != "chunk_kda":
        return functions
    fixed, each = _seconds(request)
    return functions._replace(seconds=fixed + each * request.B * request.T * request.HV)


def _seconds(request: Request) -> tuple[float, float]:
    if not request.needs_grad:
        return FORWARD_SECONDS
    kept = request.kind == "torch" and not request.packed
    return KEPT_TRAINING_SECONDS if kept else TRAINING_SECONDS
