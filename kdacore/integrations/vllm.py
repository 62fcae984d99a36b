"""vLLM computes Kimi Delta Attention and the gated delta rule with kdacore, its code and its callers unchanged.

vLLM finds :func:`plugin` by its entry point. It does nothing unless ``KDACORE_INTEGRATIONS`` names ``vllm``; then the
functions below are replaced in vLLM's modules as these are imported: prefill (with FlashKDA's buffers and with gathered
states), decoding of packed projections, fused decode steps, and the verification of drafted tokens. A call that kdacore
would not serve, or only by its reference backend, stays with vLLM. Call :func:`activate` to do the same without the
entry point.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kdacore import integrations
from kdacore.compat.call import Call
from kdacore.integrations import fused_steps, later_imports
from kdacore.integrations import vllm_arguments as kda
from kdacore.integrations import vllm_decode_arguments as decode
from kdacore.integrations import vllm_gdn_arguments as gdn
from kdacore.integrations import vllm_ling_arguments as ling
from kdacore.integrations.handover import Handover, handed_over
from kdacore.integrations.hooks import Hook, HookStatus, Patches
from kdacore.integrations.vllm_layers import (
    with_arrays_of_layer,
    with_prefills_of_qwen,
    with_steps_of_kimi,
)
from kdacore.machine import version_of

Translator = Callable[..., Call]
_GDN_LAYERS = "vllm.model_executor.layers.mamba.gdn"
_STEPS_OF_KIMI = decode.kda_decode_step, kda.kda_prefill
_PREFILLS_OF_QWEN = gdn.fused_recurrent_gated_delta_rule_packed_decode, gdn.gdn_prefill

REPLACED: dict[str, dict[str, tuple[Translator, ...]]] = {
    "vllm.models.kimi_k3.nvidia.kda": {
        "_flashkda_prefill": (kda.flashkda_prefill,),
        "KimiK3DeltaAttention._forward": _STEPS_OF_KIMI,
    },
    f"{_GDN_LAYERS}.kimi_gdn_linear_attn": {"KimiGatedDeltaNetAttention._forward": _STEPS_OF_KIMI},
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": (kda.chunk_kda_with_fused_gate,),
        "fused_recurrent_kda": (kda.fused_recurrent_kda,),
        "fused_recurrent_kda_packed_decode": (kda.fused_recurrent_kda_packed_decode,),
    },
    "vllm.models.glm5next.nvidia.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": (kda.glm_chunk_kda_with_fused_gate,),
        "fused_recurrent_kda": (kda.glm_fused_recurrent_kda,),
    },
    f"{_GDN_LAYERS}.qwen_gdn_linear_attn": {
        "fla_chunk_gated_delta_rule": (gdn.chunk_gated_delta_rule,),
        "fused_recurrent_gated_delta_rule_packed_decode": (
            gdn.fused_recurrent_gated_delta_rule_packed_decode,
        ),
        "fused_sigmoid_gating_delta_rule_update": (gdn.fused_sigmoid_gating_delta_rule_update,),
        "QwenGatedDeltaNetAttention._forward_core": _PREFILLS_OF_QWEN,
        "QwenGatedDeltaNetAttention._forward_core_decode_non_spec": (decode.gdn_decode_step,),
    },
    f"{_GDN_LAYERS}.olmo_gdn_linear_attn": {
        "chunk_gated_delta_rule": (gdn.chunk_gated_delta_rule,),
        "fused_recurrent_gated_delta_rule": (gdn.fused_recurrent_gated_delta_rule,),
    },
    "vllm.model_executor.models.bailing_moe_v3": {
        "chunk_kda": (ling.ling_chunk_kda,),
        "fused_recurrent_kda": (ling.ling_fused_recurrent_kda,),
        "fused_recurrent_kda_fwd": (ling.ling_fused_recurrent_kda_fwd,),
    },
    "vllm._custom_ops": {
        "fused_gdn_decode_post_conv_mtp": (decode.fused_gdn_decode_post_conv_mtp,),
    },
}
"""The functions and methods that are replaced and what translates their arguments, by the module that they are looked
up in."""

_LAYERS_OF = "0.33."
"""Versions whose layers' methods are replaced: their hooks read attributes of the layer and of its step's metadata,
which no signature tells of."""

_HOOKS: dict[tuple[Translator, ...], Callable[..., Callable[..., Any]]] = {
    _STEPS_OF_KIMI: with_steps_of_kimi,
    _PREFILLS_OF_QWEN: with_prefills_of_qwen,
    (decode.gdn_decode_step,): with_arrays_of_layer,
}
"""What replaces a function, where that is not :func:`handed_over`; made of the handover of each translation."""
_FUSED: tuple[Translator, ...] = (
    decode.kda_decode_step,
    decode.gdn_decode_step,
    decode.fused_gdn_decode_post_conv_mtp,
)
_WHY_LEFT = dict.fromkeys(_FUSED, fused_steps.why_left)

_active = False


def is_active() -> bool:
    """Does vLLM hand calls to kdacore?"""
    return _active


_HANDOVERS = {
    translator: Handover(translator, Hook(translator.__name__), is_active, _WHY_LEFT.get(translator))
    for functions in REPLACED.values()
    for translators in functions.values()
    for translator in translators
}
_patches = Patches()


def plugin() -> None:
    """The entry point in vLLM's group ``vllm.general_plugins``."""
    integrations.activate_for("vllm")


def activate() -> None:
    """Hand vLLM's calls to kdacore from now on. Nothing of vLLM is imported."""
    global _active
    if _active:
        return
    _active = True
    for name in REPLACED:
        later_imports.when_imported(name, _replace)


def deactivate() -> None:
    """Leave every call to vLLM again."""
    global _active
    later_imports.forget(_replace)
    _patches.undo()
    for handover in _HANDOVERS.values():
        handover.hook.place = ""
    _active = False


def status() -> tuple[HookStatus, ...]:
    """Each function, where it was replaced, and how many of its calls in this process kdacore took and declined."""
    return tuple([handover.hook.status() for handover in _HANDOVERS.values()])


def _replace(module: ModuleType) -> None:
    for name, translators in REPLACED[module.__name__].items():
        handovers = [_HANDOVERS[translator] for translator in translators]
        *classes, attribute = name.split(".")
        owner: Any = module
        for part in classes:
            owner = getattr(owner, part, None)
        if why := _why_left(owner, attribute, of_layer=bool(classes)):
            for handover in handovers:
                handover.hook.reason = why
            said = f"kdacore leaves {module.__name__}.{name} to vLLM: {why}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
            continue
        _patches.replace(
            owner, attribute, functools.partial(_HOOKS.get(translators, handed_over), *handovers)
        )
        here = f"{module.__name__}.{name}, replaced"
        for hook in [handover.hook for handover in handovers]:
            hook.place = f"{hook.place}; {here}" if hook.place else here


def _why_left(owner: Any, attribute: str, of_layer: bool) -> str:
    """Why a function of a module, or a method of a layer's class, stays vLLM's; empty where it is replaced."""
    if getattr(owner, attribute, None) is None:
        return f"vLLM {version_of('vllm') or 'as installed'} has no such function"
    version = version_of("vllm") if of_layer else ""
    if version and not version.startswith(_LAYERS_OF):
        return f"methods of layers are replaced in vLLM {_LAYERS_OF}*, and this is {version}"
    return ""
