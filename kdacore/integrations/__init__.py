"""Other projects that compute with kdacore, their code and their callers' unchanged: one module for each.

Importing a module here activates it. :func:`activate` does so by name, or for the names in ``KDACORE_INTEGRATIONS``.

To add one: a module here with ``activate``, ``deactivate``, ``is_active`` and ``status``, made of the parts in
``hooks.py`` and ``handover.py``; its row in ``_HOSTS``; its name in :data:`kdacore.config.INTEGRATIONS`. A plugin that
the host finds by an entry point calls :func:`activate` without a name, so that it does nothing unless it is asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from kdacore import config
from kdacore.errors import ContractError, shown
from kdacore.integrations.hooks import HookStatus

__all__ = ["IntegrationStatus", "activate", "deactivate", "status"]


@dataclass(frozen=True, slots=True)
class _Host:
    """What is known of an integration without importing anything of it."""

    distributions: tuple[str, ...]
    """The host's distribution; of several the first that is installed."""
    functions: tuple[str, ...]
    """What it would hand over."""
    place: Callable[[str], str]
    """Where, by the host's version."""


def _place_in_fla(version: str) -> str:
    before = re.match(r"0\.[0-5](\D|$)", version)  # a pre-release of 0.6 has its registry where 0.6 has it
    return "fla.ops.backends" if before else "fla.backends"


def _place_in_transformers(_: str) -> str:
    installed = _installed(_HOSTS["fla"])
    return "the registry of fla" if installed else "the functions of transformers.models"


_HOSTS: dict[str, _Host] = {
    "fla": _Host(
        ("fla-core", "flash-linear-attention"),
        (
            "chunk_kda",
            "fused_recurrent_kda_fwd",
            "fused_kda_gate",
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
        ),
        _place_in_fla,
    ),
    "sglang": _Host(
        ("sglang",),
        tuple(
            f"{kernel}.{method}"
            for kernel in ("TritonKDAKernel", "TritonGDNKernel")
            for method in ("extend", "decode", "packed_decode", "target_verify")
        ),
        lambda _: "the kernel classes TritonKDAKernel and TritonGDNKernel",
    ),
    "transformers": _Host(
        ("transformers",),
        (
            "chunk_kda",
            "fused_recurrent_kda",
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            "causal_conv1d_fn",
            "causal_conv1d_update",
            "RMSNormGated",
        ),
        _place_in_transformers,
    ),
    "vllm": _Host(
        ("vllm",),
        (
            "flashkda_prefill",
            "chunk_kda_with_fused_gate",
            "fused_recurrent_kda",
            "fused_recurrent_kda_packed_decode",
            "glm_chunk_kda_with_fused_gate",
            "glm_fused_recurrent_kda",
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule_packed_decode",
            "fused_sigmoid_gating_delta_rule_update",
            "fused_recurrent_gated_delta_rule",
            "ling_chunk_kda",
            "ling_fused_recurrent_kda",
            "ling_fused_recurrent_kda_fwd",
            "fused_kda_decode",
            "gdn_decode_step",
            "fused_gdn_decode_post_conv_mtp",
        ),
        lambda _: "the KDA and GDN layers of vllm",
    ),
}


@dataclass(frozen=True, slots=True)
class IntegrationStatus:
    """One integration in this process."""

    name: str
    host: str
    """The host's distribution and version; empty where it is not installed."""
    place: str
    """Where kdacore is hooked into the host, or would be."""
    functions: tuple[str, ...]
    """What is hooked there, or would be."""
    active: bool
    hooks: tuple[HookStatus, ...]
    """The functions with their counts in this process; empty until the integration is imported."""


def activate(*names: str) -> tuple[str, ...]:
    """Activate integrations by name; without one, those that ``KDACORE_INTEGRATIONS`` names.

    Returns:
        The names of those that were activated.

    Raises:
        ContractError: there is no integration of a name.
        ImportError: the host is not installed.
        ConfigError: ``KDACORE_INTEGRATIONS`` names no integration.
    """
    wanted = names or config.get().integrations
    for name in wanted:
        _module(name).activate()
    return wanted


def activate_for(engine: str) -> tuple[str, ...]:
    """What an engine's entry point does: activate it, and the libraries that its models use, if
    ``KDACORE_INTEGRATIONS`` names them.

    Returns:
        The names of those that were activated.

    Raises:
        ImportError: a named library is not installed.
        ConfigError: ``KDACORE_INTEGRATIONS`` names no integration.
    """
    named = config.get().integrations
    wanted = tuple([name for name in (engine, *_LIBRARIES) if name in named])
    return activate(*wanted) if wanted else ()


_LIBRARIES = ("fla", "transformers")


def deactivate(*names: str) -> None:
    """Undo integrations by name; without one, all of this process.

    Raises:
        ContractError: there is no integration of a name.
    """
    for name in names or _HOSTS:
        _known(name)
        if (module := _imported(name)) is not None:
            module.deactivate()


def status() -> tuple[IntegrationStatus, ...]:
    """Every integration: its host, whether it is active in this process, and how often each function was called.

    Imports neither an integration nor a host.
    """
    return tuple([_status(name, host) for name, host in _HOSTS.items()])


def _status(name: str, host: _Host) -> IntegrationStatus:
    module = _imported(name)
    active = module is not None and module.is_active()
    hooks = () if module is None else module.status()
    installed = _installed(host)
    place = host.place(installed.split()[1]) if installed else ""
    return IntegrationStatus(name, installed, place, host.functions, active, hooks)


def _installed(host: _Host) -> str:
    """The host's distribution and version; empty where it is not installed."""
    for distribution in host.distributions:
        try:
            return f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def _known(name: str) -> None:
    if name not in _HOSTS:
        raise ContractError("activate", "names", shown(name), f"names out of {', '.join(_HOSTS)}")


def _imported(name: str) -> Any:
    """An integration's module, if this process has imported it."""
    return sys.modules.get(f"{__name__}.{name}")


def _module(name: str) -> Any:
    _known(name)
    return import_module(f"{__name__}.{name}")
