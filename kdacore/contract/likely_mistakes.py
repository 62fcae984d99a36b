"""Warnings of ``KDACORE_VALIDATE=values``: calls that keep the contract, with arrays as common mistakes leave them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from kdacore.contract import hints
from kdacore.errors import InputWarning
from kdacore.ops import OPS
from kdacore.types import Request

_NORMALISED = 2.0
"""Keys with a larger norm were not normalised. At ``beta = 1`` the delta rule grows without bound from a norm of the
square root of 2 on."""


def warn_of_likely_mistakes(request: Request, values: Mapping[str, Any]) -> None:
    """Warn of tokens and heads that look exchanged, and of keys that look as if nobody had normalised them.

    Args:
        request: of any op; only those of whole sequences and of decoding are looked at.
        values: its arrays, NumPy, with zeros at tokens that no sequence has.
    """
    family = OPS[request.op].family
    if family == "chunk" and min(request.H, request.K) > request.T:
        _warn(request, "q", _HEAD_FIRST.format(T=request.T, H=request.H))
    if family in ("chunk", "recurrent") and not request.qk_l2norm:
        norm = float(np.sqrt(np.square(values["k"], dtype=np.float64).sum(-1)).max(initial=0.0))
        if norm > _NORMALISED:
            _warn(request, "k", _NOT_NORMALISED.format(norm=norm))


_HEAD_FIRST = (
    "T={T} tokens of H={H} heads look head-first, [B, H, T, K]; arrays are [B, T, H, K]. If they are, pass "
    + hints.exchanged()
)
_NOT_NORMALISED = (
    "keys of norms up to {norm:.3g}: with beta * norm**2 above 2 the state grows at every token. Pass "
    "use_qk_l2norm_in_kernel=True, or normalise k"
)


def _warn(request: Request, argument: str, text: str) -> None:
    """Warn at the line that called kdacore."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kdacore":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{request.op}: argument {argument!r}: {text}", InputWarning, stacklevel=level)
