"""The fused convolution and gated RMSNorm of flash-linear-attention (FLA) in models of transformers 5.

Layers of KDA and of the gated delta rule have a short causal convolution before the recurrence and a gated RMSNorm
behind it. Without the package ``causal_conv1d`` transformers computes both with torch, in some ten elementwise kernels
a layer, where ``fla.modules`` has one kernel for each. They are taken where FLA is installed. Calls that FLA's kernels
cannot serve are the model's own as before. ``KDACORE_FLA_MODULES=0`` leaves all of them to the models.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from kdacore import config
from kdacore.arrays.torch.tensor_views import PLAIN
from kdacore.integrations.hooks import Hook, HookStatus, Patches
from kdacore.integrations.later_imports import forget, when_imported

MODELS = (
    "bailing_hybrid",
    "glm5_next",
    "kimi_linear",
    "lara_mini",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
)
"""Models whose modules have the convolution and the norm as this module knows them."""

CONVOLUTION, STEP, NORM = "causal_conv1d_fn", "causal_conv1d_update", "RMSNormGated"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SILU = ("silu", "swish")
_ACTIVATIONS_OF_NORM = (*_SILU, "sigmoid")

_patches = Patches()
_hooks = {name: Hook(name) for name in (CONVOLUTION, STEP, NORM)}


class FlaModules(NamedTuple):
    """The functions of ``fla.modules`` that take over."""

    causal_conv1d: Callable[..., Any]
    causal_conv1d_update: Callable[..., Any]
    rms_norm_gated: Callable[..., Any]


def activate() -> None:
    """Replace the parts of all models, imported before or later.

    Raises:
        ImportError: flash-linear-attention is not installed, or does not have them.
    """
    _fla()
    for name in MODELS:
        when_imported(f"transformers.models.{name}.modeling_{name}", _replace_in)


def deactivate() -> None:
    """Give the models their own parts back."""
    forget(_replace_in)
    _patches.undo()


def status() -> tuple[HookStatus, ...]:
    """The three parts, and how many of their calls were FLA's and the model's own."""
    return tuple([hook.status() for hook in _hooks.values()])


@functools.cache
def _fla() -> FlaModules:
    from fla.modules.convolution import causal_conv1d, causal_conv1d_update
    from fla.modules.fused_norm_gate import rms_norm_gated

    return FlaModules(causal_conv1d, causal_conv1d_update, rms_norm_gated)


def _replace_in(module: ModuleType) -> None:
    """Replace what a model's module has of the three. Where the package ``causal_conv1d`` is installed, a model has its
    kernels, which stay."""
    has_kernels = importlib.util.find_spec("causal_conv1d") is not None
    for name, compute, why_left in (
        (CONVOLUTION, _convolve, _why_not_convolve),
        (STEP, _step, _why_not_step),
    ):
        if has_kernels:
            _hooks[name].reason = "the package causal_conv1d computes it"
        elif name in vars(module):
            _patches.replace(module, name, functools.partial(_taken, _hooks[name], compute, why_left))
            _hooks[name].place = f"transformers.models.*.{name}"
    norms = [x for name, x in vars(module).items() if name.endswith(NORM) and isinstance(x, type)]
    for norm in norms:
        if [*inspect.signature(norm.forward).parameters] == ["self", "hidden_states", "gate"]:  # type: ignore[attr-defined]
            _patches.replace(
                norm, "forward", functools.partial(_taken, _hooks[NORM], _normalise, _why_not_normalise)
            )
            _hooks[NORM].place = f"transformers.models.*{NORM}.forward"


def _taken(
    hook: Hook, compute: Callable[..., Any], why_left: Callable[..., str], original: Callable[..., Any]
) -> Callable[..., Any]:
    """A model's function, computed by FLA unless ``why_left`` gives a reason. A graph of torch.compile or torch.export
    has the model's own: the compiler fuses that, and FLA's functions would break the graph."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not config.get().fla_modules:
            return original(*args, **kwargs)
        reason = why_left(*args, **kwargs)
        if reason:
            hook.declined += 1
            hook.reason = reason
            return original(*args, **kwargs)
        hook.served += 1
        return compute(*args, **kwargs)

    return function


# --- the convolution: [B, D, T] in transformers, [B, T, D] in FLA ---------------------------------------------------


def _convolve(x: Any, weight: Any, bias: Any = None, activation: str | None = None, **_: Any) -> Any:
    y, _ = _fla().causal_conv1d(x.transpose(1, 2), weight=weight, bias=bias, activation=activation)
    return y.transpose(1, 2)


def _why_not_convolve(
    hidden_states: Any, weight: Any, bias: Any = None, activation: str | None = None, **kwargs: Any
) -> str:
    if any(kwargs.get(name) is not None for name in ("seq_idx", "cu_seqlens")):
        return "packed sequences"  # transformers' own function refuses them
    if activation is not None and activation not in _SILU:
        return f"activation {activation!r}"
    return _why_not_tensors(hidden_states, weight, bias)


def _step(x: Any, conv_state: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Any:
    """One token of each sequence. The state has as many columns as there are taps, for both, and is written in
    place."""
    y, _ = _fla().causal_conv1d_update(x.transpose(1, 2), conv_state, None, weight, bias, activation)
    return y.transpose(1, 2)


def _why_not_step(
    hidden_states: Any, conv_state: Any, weight: Any, bias: Any = None, activation: str | None = None
) -> str:
    if hidden_states.shape[-1] != 1:
        return f"{hidden_states.shape[-1]} tokens in one step"
    if conv_state.shape[-1] != weight.shape[-1] or not conv_state.is_contiguous():
        return f"a state {[*conv_state.shape]} with strides {conv_state.stride()} for {weight.shape[-1]} taps"
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden_states, weight, bias, conv_state)
    ):
        return "gradients of a step"
    return _why_not_convolve(hidden_states, weight, bias, activation) or _why_not_tensors(conv_state)


# --- the norm -------------------------------------------------------------------------------------------------------


def _normalise(self: Any, hidden_states: Any, gate: Any = None) -> Any:
    return _fla().rms_norm_gated(
        hidden_states, gate, self.weight, None, activation=self.activation, eps=self.variance_epsilon
    )


def _why_not_normalise(self: Any, hidden_states: Any, gate: Any = None) -> str:
    if gate is None or gate.shape != hidden_states.shape:
        return f"a gate {None if gate is None else [*gate.shape]} for values {[*hidden_states.shape]}"
    if self.activation not in _ACTIVATIONS_OF_NORM:
        return f"activation {self.activation!r}"
    return _why_not_tensors(hidden_states, gate, self.weight)


def _why_not_tensors(*given: Any) -> str:
    """Why FLA's kernels cannot compute with these tensors."""
    tensors = [x for x in given if x is not None]
    for x in tensors:
        if type(x) not in PLAIN:
            return f"a {type(x).__name__}"
        if x.dtype not in _DTYPES:
            return f"dtype {x.dtype}"
        if not x.numel():
            return "a tensor without elements"
        if not _runs_kernels(x):
            return f"FLA's kernels do not run on {x.device.type}"
    return ""


def _runs_kernels(x: torch.Tensor) -> bool:
    return x.device.type not in ("cpu", "meta")
