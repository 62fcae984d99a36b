"""Decode steps of SGLang's linear attention backends in one launch each: convolution, delta rule, and the gated norm
where the model hands its gate over, as Kimi K3's does.

The backend's ``forward_decode`` convolves, calls its kernel class, and copies states that the prefix cache tracks. It
is replaced where that class is one of SGLang's Triton kernels, to which the other hooks apply. What is left here goes
the way of those hooks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from kdacore.compat.call import Call
from kdacore.integrations.fused_steps import why_left
from kdacore.integrations.handover import Handover
from kdacore.integrations.hooks import Hook, HookStatus, Patches
from kdacore.integrations.sglang_decode_arguments import gdn_decode_step, kda_decode_step
from kdacore.machine import release_of, version_of

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
        given = (mixed_qkv, a, b, *convolution, *gates, states, rows, *norm)
        if not handover.verdict(given, {})[0]:
            return leave()
        o = handover.compute(*given)
        if norm:
            layer._k3_onorm_consumed = True
        self._track_mamba_state_decode(forward_batch, windows, states, rows, layer.layer_id)
        return o

    return forward_decode


def with_step_of_gdn(handover: Handover, original: Callable[..., Any]) -> Callable[..., Any]:
    """``GDNAttnBackend.forward_decode``. Qwen3.5 may hand over both projections; then it takes z back, too."""

    @functools.wraps(original)
    def forward_decode(
        self: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any
    ) -> Any:
        def leave() -> Any:
            return original(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)

        parts = _columns(layer, *mixed_qkv) if _are_two(mixed_qkv) else (mixed_qkv, a, b)
        step = _step(handover, self, layer, parts[0])
        if step is None:
            return leave()
        windows, states, rows = step
        convolution = (layer.conv_weights, layer.bias, windows)
        gates = (layer.A_log, layer.dt_bias)
        given = (*parts[:3], *convolution, *gates, states, rows, layer.activation)
        if not handover.verdict(given, {})[0]:
            return leave()
        o = handover.compute(*given)
        self._track_mamba_state_decode(forward_batch, windows, states, rows, layer.layer_id)
        return (o, parts[3].contiguous()) if len(parts) == 4 else o

    return forward_decode


def _are_two(projections: Any) -> bool:
    return isinstance(projections, tuple) and len(projections) == 2


def _columns(layer: Any, qkvz: Tensor, ba: Tensor) -> tuple[Any, ...]:
    """Channels of the convolution, a, b and z ``[B, HV, V]``: views of columns ``[q | k | v | z]`` and ``[b | a]``. No
    channels where there are other columns."""
    HV, V = layer.num_v_heads, layer.head_v_dim
    D = layer.q_dim + layer.k_dim + layer.v_dim
    if qkvz.shape[-1] != D + HV * V or ba.shape[-1] != 2 * HV:
        return None, None, None
    b, a = ba.split(HV, dim=-1)
    return qkvz[:, :D], a, b, qkvz[:, D:].unflatten(-1, (HV, V))


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
    """The windows, the states and the rows of a layer's step of one token a sequence; None where SGLang computes it."""
    if not handover.may_take():
        return None
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    rows = backend.forward_metadata.mamba_cache_indices
    if why := _why_not(backend.kernel_dispatcher.decode_kernel, layer, mixed_qkv, cache, rows):
        handover.hook.decline(why)
        return None
    return cache.conv[0], cache.temporal, rows


def _why_not(kernel: Any, layer: Any, mixed_qkv: Any, cache: Any, rows: Tensor) -> str:
    """Why a step is SGLang's; empty where kdacore may be asked."""
    name = type(kernel).__name__
    if name not in _KERNELS or not getattr(kernel, "supports_packed_decode", True):
        return f"SGLang decodes with {name}, or on another GPU than NVIDIA's and AMD's"
    if not isinstance(mixed_qkv, Tensor) or not isinstance(layer.conv_weights, Tensor):
        return "the projections or the convolution's weights are not one array as expected"
    if getattr(cache, "replayssm_d", None) is not None:
        return "states are replayed"
    if mixed_qkv.shape[0] != rows.shape[0]:
        return f"{mixed_qkv.shape[0]} tokens of {rows.shape[0]} sequences"
    return ""


def _why_left(backend: Any) -> str:
    """Why a backend keeps its method; empty where it does not."""
    if not hasattr(backend, _STEP):
        return f"it has no {_STEP}"
    version = version_of("sglang")
    first, last = _VERSIONS
    if version and not first <= release_of(version)[:3] <= last:
        names = " to ".join(".".join(map(str, v)) for v in _VERSIONS)
        return f"decode steps are replaced in SGLang {names}, and this is {version}"
    return ""
