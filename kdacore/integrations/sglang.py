"""SGLang computes Kimi Delta Attention and the gated delta rule with kdacore, its code and its callers unchanged.

SGLang finds :func:`plugin` by its entry point. It does nothing unless ``KDACORE_INTEGRATIONS`` names ``sglang``; then
hooks are registered around the methods of SGLang's two Triton kernel classes: prefill, decoding, packed decoding, and
the verification of drafted tokens. They apply where SGLang uses these classes (``--linear-attn-backend triton``), and
there the decode steps of its attention backends are replaced as well (:mod:`kdacore.integrations.sglang_decode_steps`).
A call that kdacore would not serve, or only by its reference backend, stays with SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from kdacore import integrations
from kdacore.integrations import (
    later_imports,
    sglang_arguments,
    sglang_gdn_arguments,
    sglang_tracked_states,
)
from kdacore.integrations.handover import Handover, compute_or_leave
from kdacore.integrations.hooks import Hook, HookStatus, Patches
from kdacore.integrations.sglang_decode_steps import MODULES, DecodeSteps

_KERNELS = "sglang.srt.layers.attention.linear.kernels"
KDA_KERNEL = f"{_KERNELS}.kda_triton.TritonKDAKernel"
GDN_KERNEL = f"{_KERNELS}.gdn_triton.TritonGDNKernel"
TRANSLATIONS: dict[str, ModuleType] = {KDA_KERNEL: sglang_arguments, GDN_KERNEL: sglang_gdn_arguments}
"""What translates the arguments of the methods, by the kernel class."""
METHODS = ("extend", "decode", "packed_decode", "target_verify")
_FOR_OTHER_PREFILLS = frozenset(
    {
        "extend_prefix_lens",
        "layer_id",
        "num_state_checkpoints",
        "state_checkpoint_cu_starts",
        "state_checkpoint_every_n_tokens",
    }
)
WITHOUT_EFFECT: dict[str, frozenset[str]] = {
    f"{KDA_KERNEL}.extend": _FOR_OTHER_PREFILLS
    | {
        "chunk_indices",
        "chunk_offsets",
        "extend_seq_lens_cpu",
        "is_spec_decode",
        "state_checkpoint_indices",
        "track_ssm_h_batch_src",
        "track_ssm_h_src",
    },
    f"{GDN_KERNEL}.extend": _FOR_OTHER_PREFILLS | {"output"},
    f"{GDN_KERNEL}.target_verify": frozenset({"stable_rows"}),
}
"""Keywords that SGLang passes for its other kernels, and that its Triton classes pass over."""
_NO_GPU = "SGLang runs on no NVIDIA or AMD GPU, and its kernels there may lay states out in another way"

_active = False


def is_active() -> bool:
    """Does SGLang hand calls to kdacore?"""
    return _active


def _handover(kernel: str, method: str) -> Handover:
    hook = Hook(f"{kernel.rpartition('.')[2]}.{method}")
    return Handover(getattr(TRANSLATIONS[kernel], method), hook, is_active)


_HANDOVERS = {
    f"{kernel}.{method}": _handover(kernel, method) for kernel in TRANSLATIONS for method in METHODS
}
"""By the dotted path of the method."""
_decode_steps = DecodeSteps(is_active)
_registered = False
_patches = Patches()


def plugin() -> None:
    """The entry point in SGLang's group ``sglang.srt.plugins``."""
    integrations.activate_for("sglang")


def activate() -> None:
    """Hand SGLang's calls to kdacore from now on. SGLang applies hooks when it has loaded its plugins.

    Raises:
        ImportError: SGLang is not installed, or has no registry of hooks.
    """
    global _active, _registered
    if _active:
        return
    if not _registered:  # SGLang's registry keeps hooks for good
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for method, handover in _HANDOVERS.items():
            HookRegistry.register(method, around(method), HookType.AROUND)
            handover.hook.place = f"{method}, hooked"
        _registered = True
    _active = True
    for module in MODULES:
        later_imports.when_imported(module, _replace)


def deactivate() -> None:
    """Leave every call to SGLang again. The hooks stay and pass every call on."""
    global _active
    later_imports.forget(_replace)
    _patches.undo()
    _decode_steps.forget_places()
    _active = False


def status() -> tuple[HookStatus, ...]:
    """Each method, where it is hooked, and how many of its calls in this process kdacore took and declined."""
    return (*[handover.hook.status() for handover in _HANDOVERS.values()], *_decode_steps.status())


def around(path: str) -> Callable[..., Any]:
    """The hook around the method at a dotted path: called with the method, the kernel object and the call's
    arguments."""
    handover, dropped = _HANDOVERS[path], WITHOUT_EFFECT.get(path, frozenset())
    # Its KDA backend reads states of a prefill only where it asked for them.
    returns_states = {f"{KDA_KERNEL}.extend": False, f"{GDN_KERNEL}.extend": True}.get(path)

    def hook(method: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        def leave() -> Any:
            return method(kernel, *args, **kwargs)

        if not _active:
            return leave()
        if not getattr(kernel, "supports_packed_decode", True):
            handover.hook.decline(_NO_GPU)
            return leave()
        given = {key: value for key, value in kwargs.items() if key not in dropped}
        if returns_states is not None and given.get("return_intermediate_states", returns_states):
            given |= sglang_tracked_states.wanted(given.get("cache_indices"))
        return compute_or_leave(handover, args, given, leave)

    return hook


def _replace(module: ModuleType) -> None:
    sglang_tracked_states.observe(module, _patches)
    _decode_steps.replace(module, _patches)
