"""What peers' kernels do not compute and their callers do before, by torch: the decay, beta, the l2norm.

Everything here is in the timed region of the peer that needs it, and carries gradients.
"""

from __future__ import annotations

from typing import Any

from kdacore.bench.arrays import Arrays, options
from kdacore.bench.cases import Case

_EPSILON = 1e-6
BY_TORCH = "gate and sigmoid by torch in the timed region"
"""The note of a row that :func:`log_decay` and a sigmoid are part of."""


def log_decay(case: Case, arrays: Arrays) -> Any:
    """The log decay in float32, shaped as ``g``; ``g`` itself where the case gives the decay."""
    import torch

    if not case.gate_inside:
        return arrays["g"]
    raw = arrays["g"].float() + arrays["dt_bias"]
    rate = arrays["A_log"].exp()
    rate = rate[:, None] if arrays["dt_bias"].ndim == 2 else rate
    if case.gate == "sigmoid":
        return options(case)["lower_bound"] * torch.sigmoid(rate * raw)
    return -rate * torch.nn.functional.softplus(raw)


def beta(case: Case, arrays: Arrays) -> Any:
    """Beta after the sigmoid, in its own dtype; as it is where the case gives it."""
    return arrays["beta"].sigmoid() if case.gate_inside else arrays["beta"]


def l2norm(x: Any) -> Any:
    """q or k with every head normalised, in its own dtype; computed in float32."""
    import torch

    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)).to(x.dtype)
