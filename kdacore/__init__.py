"""Kimi Delta Attention behind one API.

``import kdacore`` brings in no array framework; the caller's own arrays do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kdacore.api import (
    chunk_gated_delta_rule,
    chunk_kda,
    commit_records,
    explain,
    fused_decode_gated_delta_rule,
    fused_decode_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    kda_gate,
)
from kdacore.dispatch.plan import batch_invariant, record_selections, use_backend
from kdacore.errors import (
    BackendBuildError,
    ConfigError,
    ContractError,
    InputWarning,
    PerformanceWarning,
    PluginError,
    UnsupportedError,
)
from kdacore.registry import REGISTRY
from kdacore.types import BackendInfo, Selection

if TYPE_CHECKING:
    from kdacore import parallel, stages
    from kdacore.arrays.specs import ShapeDtype
    from kdacore.selections import selection_of
    from kdacore.version import __version__ as __version__

__all__ = [
    "BackendBuildError",
    "BackendInfo",
    "ConfigError",
    "ContractError",
    "InputWarning",
    "PerformanceWarning",
    "PluginError",
    "Selection",
    "ShapeDtype",
    "UnsupportedError",
    "backends",
    "batch_invariant",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "commit_records",
    "explain",
    "fused_decode_gated_delta_rule",
    "fused_decode_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "kda_gate",
    "parallel",
    "record_selections",
    "selection_of",
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


_LATER = {
    "compat": "kdacore.compat",
    "integrations": "kdacore.integrations",
    "parallel": "kdacore.parallel",
    "stages": "kdacore.stages",
    "ShapeDtype": "kdacore.arrays.specs",
    "selection_of": "kdacore.selections",
    "__version__": "kdacore.version",
}
"""Public names whose modules are imported when the name is first used: most calls do without them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'kdacore' has no attribute {name!r}")
    module = import_module(_LATER[name])
    value = module if module.__name__ == f"kdacore.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER})
