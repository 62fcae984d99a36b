"""Models of transformers 5 compute KDA and the gated delta rule with kdacore, their code unchanged.

Importing this module is all. The models (``kimi_linear``, ``bailing_hybrid``, ``glm5_next``, ``qwen3_next`` and others)
look their functions up in package ``fla``. Where that is installed, its own registry leads to kdacore
(:mod:`kdacore.integrations.fla`), and its fused convolution and gated RMSNorm take the place of torch's
(:mod:`kdacore.integrations.transformers_fla_modules`). Where it is not, this module takes over the functions that the
models then have: at the decorator through which modules that are imported later look them up, and in the modules
imported before. :func:`deactivate` undoes both.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

from kdacore.compat import fla_arguments
from kdacore.integrations import transformers_fla_modules
from kdacore.integrations.handover import Handover, compute_or_leave
from kdacore.integrations.hooks import Hook, HookStatus, Patches

_DECORATOR = "use_kernel_func_from_hub_with_fallback"
_HUB_KERNELS = "transformers.integrations.hub_kernels"
_MODELS = "transformers.models."

_IN_MODELS = {
    "chunk_kda": "chunk_kimi_delta_attention",
    "fused_recurrent_kda": "recurrent_kimi_delta_attention",
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
}
"""The function of ``fla`` that a model looks up, and the name that the model's own has."""

_patches = Patches()
_active = False
_through_fla = False


def is_active() -> bool:
    """Do models of transformers hand calls to kdacore?"""
    if _active and _through_fla:
        reached: bool = importlib.import_module("kdacore.integrations.fla").is_active()
        return reached
    return _active


_HANDOVERS = {name: Handover(getattr(fla_arguments, name), Hook(name), is_active) for name in _IN_MODELS}


def activate() -> None:
    """Hand the models' calls to kdacore from now on. Importing this module does so.

    Raises:
        ImportError: transformers is not installed, or does not look its functions up as release 5 does.
    """
    global _active, _through_fla
    if _active:
        return
    hub_kernels = importlib.import_module(_HUB_KERNELS)
    _through_fla = importlib.util.find_spec("fla") is not None
    if _through_fla:
        importlib.import_module("kdacore.integrations.fla").activate()
        transformers_fla_modules.activate()
    else:
        if not hasattr(hub_kernels, _DECORATOR):
            raise ImportError(f"{_HUB_KERNELS} has no {_DECORATOR}: transformers 5 is needed")
        _hook_modules_imported_later(hub_kernels)
        _hook_imported_modules()
    for name, handover in _HANDOVERS.items():
        handover.hook.place = "fla's registry" if _through_fla else f"{_MODELS}*.{_IN_MODELS[name]}"
    _active = True


def deactivate() -> None:
    """Leave the models' calls to them again. Where they go through ``fla``, its integration is deactivated with it."""
    global _active
    _active = False
    _patches.undo()
    transformers_fla_modules.deactivate()
    if _through_fla:
        importlib.import_module("kdacore.integrations.fla").deactivate()


def status() -> tuple[HookStatus, ...]:
    """Each function that is hooked and how many of its calls in this process kdacore took and declined.

    Where the calls go through ``fla``, its integration has the counts, and the parts that ``fla.modules`` computes
    follow, as served where they are FLA's. Calls inside a graph of ``torch.compile`` are not counted.
    """
    hooks = tuple([handover.hook.status() for handover in _HANDOVERS.values()])
    return (*hooks, *transformers_fla_modules.status()) if _through_fla else hooks


# --- without fla --------------------------------------------------------------------------------------------------


def _hook_modules_imported_later(hub_kernels: Any) -> None:
    """A model's module decorates its functions while it is imported."""
    _patches.replace(hub_kernels, _DECORATOR, lambda original: _decorator(hub_kernels, original))
    package = importlib.import_module("transformers.integrations")
    if _DECORATOR in vars(package):  # it keeps what was asked of it once
        _patches.replace(package, _DECORATOR, lambda _: getattr(hub_kernels, _DECORATOR))


def _decorator(hub_kernels: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator, with kdacore between the model and what it found for it."""

    @functools.wraps(original)
    def look_up(func_name: str, *args: Any, **kwargs: Any) -> Any:
        decorate = original(func_name, *args, **kwargs)
        if func_name not in _HANDOVERS:
            return decorate

        def decorated(torch_function: Callable[..., Any]) -> Any:
            taken = _taken(_HANDOVERS[func_name], decorate(torch_function), torch_function)
            # The package `kernels`, where installed, knows functions by this decorator.
            return hub_kernels.use_kernel_forward_from_hub(func_name)(taken)

        return decorated

    return look_up


def _hook_imported_modules() -> None:
    for name, module in list(sys.modules.items()):
        if not name.startswith(_MODELS):
            continue
        for function, attribute in _IN_MODELS.items():
            if attribute in vars(module):
                _patches.replace(module, attribute, functools.partial(_in_place_of, _HANDOVERS[function]))


def _in_place_of(handover: Handover, original: Callable[..., Any]) -> Any:
    return _taken(handover, original, original)


def _taken(handover: Handover, original: Callable[..., Any], named_like: Callable[..., Any]) -> Any:
    """A model's function. Its keyword arguments go to every kind of layer: those of others are left out for kdacore, as
    the model leaves them out for ``fla``."""

    @functools.wraps(named_like)
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():  # models export their own functions, never another package's
            return original(*args, **kwargs)
        given = {name: x for name, x in kwargs.items() if name in handover.parameters}
        return compute_or_leave(handover, args, given, lambda: original(*args, **kwargs))

    return function


activate()
