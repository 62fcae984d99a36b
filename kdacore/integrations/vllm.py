"""vLLM computes Kimi Delta Attention with kdacore, its code and its callers unchanged.

vLLM finds :func:`plugin` by its entry point. It does nothing unless ``KDACORE_INTEGRATIONS`` names ``vllm``; then the
functions below are replaced in vLLM's modules as these are imported: prefill (with FlashKDA's buffers and with gathered
states), decoding of packed projections, and the verification of drafted tokens. A call that kdacore would not serve, or
only by its reference backend, stays with vLLM. Call :func:`activate` to do the same without the entry point.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

from kdacore import integrations
from kdacore.integrations import later_imports, vllm_arguments
from kdacore.integrations.handover import Handover, handed_over
from kdacore.integrations.hooks import Hook, HookStatus, Patches

REPLACED: dict[str, dict[str, str]] = {
    "vllm.models.kimi_k3.nvidia.kda": {"_flashkda_prefill": "flashkda_prefill"},
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": "chunk_kda_with_fused_gate",
        "fused_recurrent_kda": "fused_recurrent_kda",
        "fused_recurrent_kda_packed_decode": "fused_recurrent_kda_packed_decode",
    },
    "vllm.models.glm5next.nvidia.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": "glm_chunk_kda_with_fused_gate",
        "fused_recurrent_kda": "glm_fused_recurrent_kda",
    },
}
"""The functions that are replaced and what translates their arguments, by the module that they are looked up in."""

_active = False


def is_active() -> bool:
    """Does vLLM hand calls to kdacore?"""
    return _active


_HANDOVERS = {
    name: Handover(getattr(vllm_arguments, name), Hook(name), is_active)
    for functions in REPLACED.values()
    for name in functions.values()
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
    _active = False


def status() -> tuple[HookStatus, ...]:
    """Each function, where it was replaced, and how many of its calls in this process kdacore took and declined."""
    return tuple([handover.hook.status() for handover in _HANDOVERS.values()])


def _replace(module: ModuleType) -> None:
    for name, translator in REPLACED[module.__name__].items():
        handover = _HANDOVERS[translator]
        _patches.replace(module, name, partial(handed_over, handover))
        handover.hook.place = f"{module.__name__}.{name}, replaced"
