"""Options of serving engines' calls: projections as they come, and gates that are bounded where they name a bound."""

from __future__ import annotations

from typing import Any

RAW: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}
"""Options of a call on a layer's projections as they come: raw gates, logits of beta, q and k not normalised."""
_LOWEST_SAFE_BOUND = -5.0
"""The lowest bound that ``safe_gate`` may promise."""


def bounded_gate(lower_bound: float | None) -> dict[str, Any]:
    """``lower_bound``, and ``safe_gate`` where the bound allows it."""
    safe = lower_bound is not None and lower_bound >= _LOWEST_SAFE_BOUND
    return {"lower_bound": lower_bound, "safe_gate": safe}
