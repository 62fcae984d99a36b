"""The kinds of gate that the kernels tell apart, and which of them a request has. No torch, no Triton."""

from __future__ import annotations

from typing import Any

from kdacore.types import Request

GATES = {"log": 0, "softplus": 1, "sigmoid": 2}
"""``Request.gate`` -> the kernels' GATE constexpr."""

BETAS = {"given": 0, "sigmoid": 1, "twice sigmoid": 2}
"""What beta holds -> the kernels' BETA constexpr; see :func:`beta_kind`."""

FAMILIES = {"bounded": 0, "unbounded": 1, "scalar": 2}
"""How decays of a chunk are kept in range -> the FAMILY constexpr of the chunk forward's prepare kernel.

``bounded``: each step's log decay is at least MIN_BOUND. ``unbounded``: no such bound. ``scalar``: one decay per head.
"""

MIN_BOUND = -5.0
"""The lowest natural-log decay per step that one constant exponent offset serves."""

EXAMPLE_OPTIONS: dict[str, dict[str, Any]] = {
    "bounded": {"gate": "sigmoid", "lower_bound": MIN_BOUND, "safe_gate": True},
    "unbounded": {"gate": "softplus"},
    "scalar": {"gate": "softplus", "scalar_gate": True},
}
"""Fields of a request of each family: for tuning and for compiling ahead of time."""


def has_usable_bound(r: Request) -> bool:
    """Is every step's log decay at least MIN_BOUND?"""
    promised = r.gate == "sigmoid" or r.safe_gate
    return promised and r.lower_bound is not None and r.lower_bound >= MIN_BOUND


def beta_kind(r: Request) -> int:
    """The BETA constexpr of a request: the rate is beta, its sigmoid, or twice its sigmoid."""
    if not r.beta_sigmoid:
        return BETAS["given"]
    return BETAS["twice sigmoid" if r.neg_eigval else "sigmoid"]


def gate_family(r: Request) -> str:
    """The family of a request's gate: a key of FAMILIES."""
    if r.scalar_gate:
        return "scalar"
    return "bounded" if has_usable_bound(r) else "unbounded"
