"""SGLang computes Kimi Delta Attention with kdacore, its code and its callers unchanged.

SGLang finds :func:`plugin` by its entry point. It does nothing unless ``KDACORE_INTEGRATIONS`` names ``sglang``; then
hooks are registered around the methods of SGLang's Triton kernel class: prefill, decoding, packed decoding, and the
verification of drafted tokens. They apply where SGLang uses that class (``--linear-attn-backend triton``, its default).
A call that kdacore would not serve, or only by its reference backend, stays with SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdacore import integrations
from kdacore.integrations import sglang_arguments
from kdacore.integrations.handover import Handover, compute_or_leave
from kdacore.integrations.hooks import Hook, HookStatus

KERNEL_CLASS = "sglang.srt.layers.attention.linear.kernels.kda_triton.TritonKDAKernel"
METHODS = ("extend", "decode", "packed_decode", "target_verify")
WITHOUT_EFFECT: dict[str, frozenset[str]] = {
    "extend": frozenset(
        {
            "chunk_indices",
            "chunk_offsets",
            "extend_prefix_lens",
            "extend_seq_lens_cpu",
            "is_spec_decode",
            "layer_id",
            "num_state_checkpoints",
            "state_checkpoint_cu_starts",
            "state_checkpoint_every_n_tokens",
            "state_checkpoint_indices",
            "track_ssm_h_batch_src",
            "track_ssm_h_src",
        }
    )
}
"""Keywords that SGLang passes for its other kernels, and that its Triton class passes over."""

_active = False


def is_active() -> bool:
    """Does SGLang hand calls to kdacore?"""
    return _active


_HANDOVERS = {name: Handover(getattr(sglang_arguments, name), Hook(name), is_active) for name in METHODS}
_registered = False


def plugin() -> None:
    """The entry point in SGLang's group ``sglang.srt.plugins``."""
    integrations.activate_for("sglang")


def activate() -> None:
    """Hand SGLang's calls to kdacore from now on. SGLang applies hooks when it has loaded its plugins.

    Raises:
        ImportError: SGLang is not installed, or has no registry of hooks.
    """
    global _active, _registered
    _active = True
    if _registered:  # SGLang's registry keeps hooks for good
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in METHODS:
        HookRegistry.register(f"{KERNEL_CLASS}.{name}", around(name), HookType.AROUND)
        _HANDOVERS[name].hook.place = f"{KERNEL_CLASS}.{name}, hooked"
    _registered = True


def deactivate() -> None:
    """Leave every call to SGLang again. The hooks stay and pass every call on."""
    global _active
    _active = False


def status() -> tuple[HookStatus, ...]:
    """Each method, where it is hooked, and how many of its calls in this process kdacore took and declined."""
    return tuple([handover.hook.status() for handover in _HANDOVERS.values()])


def around(name: str) -> Callable[..., Any]:
    """The hook around one method: called with the method, the kernel object and the call's arguments."""
    handover, dropped = _HANDOVERS[name], WITHOUT_EFFECT.get(name, frozenset())

    def hook(method: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        def leave() -> Any:
            return method(kernel, *args, **kwargs)

        if not _active:
            return leave()
        given = {key: value for key, value in kwargs.items() if key not in dropped}
        return compute_or_leave(handover, args, given, leave)

    return hook
