"""Other projects that compute with kdacore, their code and their callers' unchanged: one module for each.

Importing a module here activates it. :func:`activate` does so by name, or for the names in ``KDACORE_INTEGRATIONS``.
"""

from __future__ import annotations

import sys
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
    ),
    "sglang": _Host(("sglang",), ("extend", "decode", "packed_decode", "target_verify")),
    "vllm": _Host(
        ("vllm",),
        (
            "flashkda_prefill",
            "chunk_kda_with_fused_gate",
            "fused_recurrent_kda",
            "fused_recurrent_kda_packed_decode",
            "glm_chunk_kda_with_fused_gate",
            "glm_fused_recurrent_kda",
        ),
    ),
    "transformers": _Host(
        ("transformers",),
        (
            "chunk_kda",
            "fused_recurrent_kda",
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class IntegrationStatus:
    """One integration in this process."""

    name: str
    host: str
    """The host's distribution and version; empty where it is not installed."""
    active: bool
    hooks: tuple[HookStatus, ...]
    """Empty until the integration is imported: what it would hook is in ``functions``."""
    functions: tuple[str, ...]


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
        if (module := sys.modules.get(f"{__name__}.{name}")) is not None:
            module.deactivate()


def status() -> tuple[IntegrationStatus, ...]:
    """Every integration: its host, whether it is active in this process, and how often each function was called.

    Imports neither an integration nor a host.
    """
    return tuple([_status(name, host) for name, host in _HOSTS.items()])


def _status(name: str, host: _Host) -> IntegrationStatus:
    module: Any = sys.modules.get(f"{__name__}.{name}")
    active = module is not None and module.is_active()
    hooks = () if module is None else module.status()
    return IntegrationStatus(name, _installed(host), active, hooks, host.functions)


def _installed(host: _Host) -> str:
    for distribution in host.distributions:
        try:
            return f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def _known(name: str) -> None:
    if name not in _HOSTS:
        raise ContractError("activate", "names", shown(name), f"names out of {', '.join(_HOSTS)}")


def _module(name: str) -> Any:
    _known(name)
    return import_module(f"{__name__}.{name}")
