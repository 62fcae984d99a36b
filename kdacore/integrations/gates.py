"""The gate of serving engines: bounded where they name a bound."""

from __future__ import annotations

from typing import Any

_LOWEST_SAFE_BOUND = -5.0
"""The lowest bound that ``safe_gate`` may promise."""


def bounded_gate(lower_bound: float | None) -> dict[str, Any]:
    """``lower_bound``, and ``safe_gate`` where the bound allows it."""
    safe = lower_bound is not None and lower_bound >= _LOWEST_SAFE_BOUND
    return {"lower_bound": lower_bound, "safe_gate": safe}
