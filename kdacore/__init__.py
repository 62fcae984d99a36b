"""Kimi Delta Attention behind one API.

``import kdacore`` brings in no array framework; the caller's own arrays do.
"""

from __future__ import annotations

from kdacore import stages
from kdacore.api import (
    chunk_gated_delta_rule,
    chunk_kda,
    explain,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    kda_gate,
)
from kdacore.arrays import ShapeDtype
from kdacore.dispatch.call import record_selections, use_backend
from kdacore.errors import (
    BackendBuildError,
    ConfigError,
    ContractError,
    PerformanceWarning,
    PluginError,
    UnsupportedError,
)
from kdacore.registry import REGISTRY
from kdacore.types import BackendInfo, Selection

__version__ = "0.1.0"

__all__ = [
    "BackendBuildError",
    "BackendInfo",
    "ConfigError",
    "ContractError",
    "PerformanceWarning",
    "PluginError",
    "Selection",
    "ShapeDtype",
    "UnsupportedError",
    "backends",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "explain",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "kda_gate",
    "record_selections",
    "stages",
    "use_backend",
]


def backends() -> tuple[BackendInfo, ...]:
    """Every backend there is: what it serves, whether it can run here, and what would make it so.

    Examples:
        >>> import kdacore
        >>> "reference" in [info.name for info in kdacore.backends()]
        True
    """
    return REGISTRY.infos()
