"""flash-linear-attention computes KDA and the gated delta rule with kdacore, its callers unchanged.

Importing this module is all: it registers kdacore where flash-linear-attention 0.6 (``fla.backends``) or 0.5
(``fla.ops.backends``) keeps its backends. Functions that do not go through that registry are replaced where they are
called. A call that FlashQLA computes faster, by the committed records, is left to it where it is installed.
``FLA_KDACORE=0`` leaves every call to flash-linear-attention; :func:`deactivate` undoes everything.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdacore import config
from kdacore.compat import fla_arguments
from kdacore.compat.fla_cp_context import note_whole_row
from kdacore.integrations.flash_qla_times import why_slower
from kdacore.integrations.handover import Handover, handed_over, was_asked_for
from kdacore.integrations.hooks import Hook, HookStatus, Patches

if TYPE_CHECKING:
    from kdacore.types import Selection

_FUNCTIONS = (
    "chunk_kda",
    "fused_recurrent_kda_fwd",
    "fused_kda_gate",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
)
_patches = Patches()
_active = False


def is_active() -> bool:
    """Does flash-linear-attention hand calls to kdacore?"""
    return _active and config.get().fla_kdacore


def _why_left_to_flash_qla(selection: Selection, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why FlashQLA, next in the registry, is to compute a call that kdacore could. Empty where it is not: kdacore is as
    fast, or was asked for, or FlashQLA cannot compute it here."""
    if was_asked_for(selection) or selection.request.batch_invariant:
        return ""
    reason = why_slower(selection.request)
    return reason if reason and _flash_qla_takes(args, kwargs) else ""


_HANDOVERS = {
    name: Handover(
        getattr(fla_arguments, name),
        Hook(name),
        is_active,
        _why_left_to_flash_qla if name == "chunk_gated_delta_rule" else None,
    )
    for name in _FUNCTIONS
}


def activate() -> None:
    """Hand calls to kdacore from now on. Importing this module does so; needed again only after :func:`deactivate`.

    Raises:
        ImportError: flash-linear-attention is not installed, or keeps its registry in neither known place.
    """
    global _active
    if _active:
        return
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        text = "FLA_DISABLE_BACKEND_DISPATCH=1: flash-linear-attention asks no backend, so kdacore is not activated"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return
    _register()
    _replace_recurrent_gdn()
    _note_whole_rows()
    _active = True


def deactivate() -> None:
    """Leave every call to flash-linear-attention again. Its registry keeps an entry for kdacore, switched off."""
    global _active
    _patches.undo()
    _active = False


def status() -> tuple[HookStatus, ...]:
    """Each function that is hooked, where, and how many of its calls in this process kdacore took and declined.

    Calls inside a graph of ``torch.compile`` are not counted.
    """
    return tuple([handover.hook.status() for handover in _HANDOVERS.values()])


# --- the registry -------------------------------------------------------------------------------------------------


def _backend_class(base: type) -> type:
    """A backend of flash-linear-attention. It asks ``verify`` of the backends in order of priority at every call of a
    function of its registry, and calls the method of that function's name of the first that accepts."""

    class KdacoreBackend(base):
        backend_type = "kdacore"
        package_name = "kdacore"
        env_var = "FLA_KDACORE"
        priority = 1  # FlashKDA and FlashQLA have 3

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod  # before 0.6 it is asked of the class
        def is_enabled() -> bool:
            return is_active()

        def verify(self, function_name: str, /, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            handover = _HANDOVERS.get(function_name)
            if handover is None:  # a part of one of the functions; there is no method of its name either
                return False, "kdacore computes whole functions, not their parts"
            return handover.verdict(args, kwargs)

    for name, handover in _HANDOVERS.items():
        setattr(KdacoreBackend, name, staticmethod(handover.compute))
    return KdacoreBackend


def _register() -> None:
    try:
        from fla.backends import BaseBackend, register
    except ModuleNotFoundError as error:
        if error.name == "fla":
            raise ModuleNotFoundError(
                "flash-linear-attention, whose calls kdacore.integrations.fla hands to kdacore, is not installed; for "
                "calls of your own: from kdacore.compat.fla import chunk_kda",
                name="fla",
            ) from None
        if error.name != "fla.backends":
            raise
        _register_before_0_6()
        return
    from fla.ops.kda.chunk import chunk_kda

    backend = _backend_class(BaseBackend)
    register(chunk_kda)(backend)
    _HANDOVERS["chunk_kda"].hook.place = "fla.backends, registry of chunk_kda"
    for operation in ("kda", "gated_delta_rule"):
        register(operation)(backend)
    for name, operation in _IN_OPERATIONS.items():
        _HANDOVERS[name].hook.place = f"fla.backends, registry of {operation}"


_IN_OPERATIONS = {
    "fused_recurrent_kda_fwd": "kda",
    "fused_kda_gate": "kda",
    "chunk_gated_delta_rule": "gated_delta_rule",
}
"""Functions whose registry is that of their operation."""


def _register_before_0_6() -> None:
    from fla.ops.backends import BaseBackend
    from fla.ops.gated_delta_rule.backends import gdr_registry
    from fla.ops.kda.backends import kda_registry

    backend = _backend_class(BaseBackend)()
    kda_registry.register(backend)
    gdr_registry.register(backend)
    for name, operation in {**_IN_OPERATIONS, "chunk_kda": "kda"}.items():
        _HANDOVERS[name].hook.place = f"fla.ops.backends, registry of {operation}"
    handover = _HANDOVERS["fused_recurrent_kda_fwd"]
    module = importlib.import_module("fla.ops.kda.fused_recurrent")
    _replace(module, "fused_recurrent_kda_fwd", handover, lambda original: handed_over(handover, original))


# --- FlashQLA -----------------------------------------------------------------------------------------------------


def _flash_qla_takes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Would flash-linear-attention, of itself, hand this call to FlashQLA? By the rules of its own backend, and only
    where FlashQLA can be imported and compiled."""
    backend = _flash_qla_backend()
    if backend is None or not (backend.is_available() and backend.is_enabled()):
        return False
    accepted, _ = backend.verify("chunk_gated_delta_rule", *args, **kwargs)
    return accepted and _flash_qla_is_usable()


@functools.cache
def _flash_qla_backend() -> Any:
    """flash-linear-attention's backend for FlashQLA; None before 0.5.2, which has none."""
    name = "fla.ops.gated_delta_rule.backends.flash_qla"
    try:
        return importlib.import_module(name).FlashQLABackend()
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return None


@functools.cache
def _flash_qla_is_usable() -> bool:
    """Its kernels are compiled by nvcc at their first call, and it refuses to be imported where it has none."""
    from fla.utils import has_usable_nvcc

    if not has_usable_nvcc():
        return False
    try:
        importlib.import_module("flash_qla")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        text = f"flash_qla is installed and cannot be imported, so kdacore computes what it would: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False
    return True


# --- functions that have no registry ------------------------------------------------------------------------------


def _replace(module: Any, attribute: str, handover: Handover, make: Callable[[Any], Any]) -> None:
    _patches.replace(module, attribute, make)
    handover.hook.place = f"{module.__name__}.{attribute}, replaced"


def _replace_recurrent_gdn() -> None:
    """The function hands its checked arguments to an ``autograd.Function`` that it looks up in its module. That one is
    replaced: so it does not matter who has imported the function already, and under which name."""
    handover = _HANDOVERS["fused_recurrent_gated_delta_rule"]
    module = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
    _replace(module, "FusedRecurrentFunction", handover, lambda original: _RecurrentGDN(handover, original))


def _note_whole_rows() -> None:
    """Contexts of a context parallel call hold the offsets within a rank; those of the whole row are noted on them
    where they are made. The function is looked up in its module by ``fla.ops.cp.build_cp_context``."""
    name = "fla.ops.cp.context"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:  # a release without context parallel calls
        if error.name is None or not name.startswith(error.name):
            raise
        return
    _patches.replace(module, "get_cp_cu_seqlens", _noting_whole_rows)


def _noting_whole_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_cp_cu_seqlens(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        note_whole_row(context, given["cu_seqlens"], given.get("cu_seqlens_cpu"))
        return context

    return get_cp_cu_seqlens


class _RecurrentGDN:
    """Takes the place of flash-linear-attention's ``FusedRecurrentFunction``."""

    def __init__(self, handover: Handover, original: Any) -> None:
        names = tuple(inspect.signature(original.forward).parameters)[1:]  # without ctx

        def by_name(*args: Any) -> dict[str, Any]:
            given = dict(zip(names, args, strict=True))
            given["use_gate_in_kernel"] = given["A_log"] is not None
            return given

        taken = handed_over(handover, lambda **given: original.apply(*[given[name] for name in names]))
        self.apply = lambda *args: taken(**by_name(*args))


activate()
