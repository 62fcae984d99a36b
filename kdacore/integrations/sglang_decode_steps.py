"""Decode steps of SGLang's linear attention backends in one launch each: convolution, delta rule, and the gated norm
where the model hands its gate over, as Kimi K3's does.

The backend's ``forward_decode`` convolves, calls its kernel class, and copies states that the prefix cache tracks. It
is replaced where that class is one of SGLang's Triton kernels, to which the other hooks apply. What is left here goes
the way of those hooks: packed projections of Qwen's models in their fused form, for example.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from torch import Tensor

from kdacore.compat.call import Call
from kdacore.integrations.fused_steps import why_left
from kdacore.integrations.handover import Handover, compute_or_leave
from kdacore.integrations.hooks import Hook, HookStatus, Patches
from kdacore.integrations.sglang_decode_arguments import gdn_decode_step, kda_decode_step

_BACKENDS = "sglang.srt.layers.attention.linear"
_STEP = "forward_decode"
_VERSIONS = (0, 5, 17), (0, 5, 23)
"""The first and the last release whose backends and layers are known to have the attributes that are read here."""
_KERNELS = ("TritonKDAKernel", "TritonGDNKernel")


def with_step_of_kda(handover: Handover, original: Callable[..., Any]) -> Callable[..., Any]:
    """``KDAAttnBackend.forward_decode``. Where the model hands over its gate for the norm, it is told that the norm has
    been applied."""

    @functools.wraps(original)
    def forward_decode(
        self: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
    ) -> Any:
        def leave() -> Any:
            return original(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)

        step = _step(handover, self, layer, mixed_qkv)
        if step is None or getattr(layer, "_k3_deferred_f_b", False):
            return leave()
        windows, states, rows = step
        gate = getattr(layer, "_k3_onorm_gate", None)
        parts = getattr(layer, "_k3_fused_decode_args", None)
        norm = () if gate is None or parts is None else (gate, *parts[5:7])
        convolution = (layer.conv_weights, layer.bias, windows.transpose(-1, -2))
        gates = (layer.A_log, layer.dt_bias, getattr(layer, "lower_bound", None))
        o = compute_or_leave(
            handover, (mixed_qkv, a, b, *convolution, *gates, states, rows, *norm), {}, _nothing
        )
        if o is None:
            return leave()
        if norm:
            layer._k3_onorm_consumed = True
        self._track_mamba_state_decode(forward_batch, windows, states, rows, layer.layer_id)
        return o

    return forward_decode


def with_step_of_gdn(handover: Handover, original: Callable[..., Any]) -> Callable[..., Any]:
    """``GDNAttnBackend.forward_decode``."""

    @functools.wraps(original)
    def forward_decode(
        self: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
    ) -> Any:
        step, o = _step(handover, self, layer, mixed_qkv), None
        if step is not None:
            windows, states, rows = step
            convolution = (layer.conv_weights, layer.bias, windows)
            gates = (layer.A_log, layer.dt_bias)
            given = (mixed_qkv, a, b, *convolution, *gates, states, rows, layer.activation)
            o = compute_or_leave(handover, given, {}, _nothing)
        if o is None:
            return original(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)
        self._track_mamba_state_decode(forward_batch, windows, states, rows, layer.layer_id)
        return o

    return forward_decode


_HOOKS: dict[str, tuple[str, Callable[..., Call], Callable[..., Callable[..., Any]]]] = {
    f"{_BACKENDS}.kda_backend": ("KDAAttnBackend", kda_decode_step, with_step_of_kda),
    f"{_BACKENDS}.gdn_backend": ("GDNAttnBackend", gdn_decode_step, with_step_of_gdn),
}
MODULES = tuple(_HOOKS)
"""The modules of the backends."""


class DecodeSteps:
    """The hooks of both backends.

    Args:
        is_active: whether the integration takes any call at present.
    """

    def __init__(self, is_active: Callable[[], bool]) -> None:
        self._handovers = {
            module: Handover(translate, Hook(f"{backend}.{_STEP}"), is_active, why_left)
            for module, (backend, translate, _) in _HOOKS.items()
        }

    def replace(self, module: ModuleType, patches: Patches) -> None:
        """Replace the method in a module's backend, where the release is known."""
        name, _, hook = _HOOKS[module.__name__]
        backend, handover = getattr(module, name, None), self._handovers[module.__name__]
        path = f"{module.__name__}.{name}.{_STEP}"
        if why := _why_left(backend):
            handover.hook.reason = why
            warnings.warn(f"kdacore leaves {path} to SGLang: {why}", RuntimeWarning, stacklevel=2)
            return
        patches.replace(backend, _STEP, functools.partial(hook, handover))
        handover.hook.place = f"{path}, replaced"

    def forget_places(self) -> None:
        for handover in self._handovers.values():
            handover.hook.place = ""

    def status(self) -> tuple[HookStatus, ...]:
        return tuple([handover.hook.status() for handover in self._handovers.values()])


def _step(
    handover: Handover, backend: Any, layer: Any, mixed_qkv: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The windows, the states and the rows of a layer's step of one token a sequence; None where SGLang computes it:
    other kernels than its Triton ones, states that are replayed, projections that are not one array."""
    if not handover.is_active() or not all(isinstance(x, Tensor) for x in (mixed_qkv, layer.conv_weights)):
        return None
    kernel = backend.kernel_dispatcher.decode_kernel
    if type(kernel).__name__ not in _KERNELS or not getattr(kernel, "supports_packed_decode", True):
        return None
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    rows = backend.forward_metadata.mamba_cache_indices
    if getattr(cache, "replayssm_d", None) is not None or mixed_qkv.shape[0] != rows.shape[0]:
        return None
    return cache.conv[0], cache.temporal, rows


def _nothing() -> None:
    """In place of a step that kdacore does not take."""


def _why_left(backend: Any) -> str:
    """Why a backend keeps its method; empty where it does not."""
    if not hasattr(backend, _STEP):
        return f"it has no {_STEP}"
    version = _installed()
    numbers = tuple(int(n) for n in version.split(".")[:3] if n.isdigit())
    first, last = _VERSIONS
    if version and not first <= numbers <= last:
        names = " to ".join(".".join(map(str, v)) for v in _VERSIONS)
        return f"decode steps are replaced in SGLang {names}, and this is {version}"
    return ""


def _installed() -> str:
    """SGLang's version; empty where it has no metadata."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""
