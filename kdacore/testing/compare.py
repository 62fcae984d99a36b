"""Comparing arrays of any kind: relative errors, and bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kdacore.selfcheck.check import relative_error

_FLOAT16_TINY = 2.0**-14
"""Smallest normal float16: gates that hardly react have gradients below it."""
_FLOAT32_TINY = 2.0**-100
"""Numbers this small may have had a factor below the smallest normal float32 (2**-126), which arithmetic may take for
zero: the slope of a gate whose sigmoid is exp(-92), times the gradients that reach it."""

__all__ = ["Finding", "Findings", "bits", "relative_error", "to_float64"]


@dataclass(frozen=True)
class Finding:
    """One measured property of a case: it holds when ``error <= bound``. Bit-for-bit properties have bound 0."""

    what: str
    error: float
    bound: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        text = f"{self.what}: error {self.error:.3g}, bound {self.bound:.3g}"
        return f"{text} ({self.detail})" if self.detail else text


@dataclass
class Findings:
    """Collects what a check measured; nothing is raised before all of it is known."""

    items: list[Finding] = field(default_factory=list)

    def close(self, what: str, got: Any, want: Any, bound: float, dtype: str = "float32") -> None:
        """``got`` is within ``bound`` of the float64 ``want``. Other shapes, NaN and infinity never are.

        ``dtype``: of the result; what underflows in it is not counted as an error.
        """
        got = to_float64(got)
        want = np.asarray(want, np.float64)
        detail = ""
        if got.shape != want.shape:
            detail = f"shape {list(got.shape)}, wanted {list(want.shape)}"
        elif not np.isfinite(got).all():
            detail = f"{int((~np.isfinite(got)).sum())} of {got.size} values are not finite"
        error = relative_error(got, want)
        if dtype != "float64" and error > bound and not detail:
            tiny = _FLOAT16_TINY if dtype == "float16" else _FLOAT32_TINY
            lost = tiny * np.sqrt(want.size) / (np.linalg.norm(want) or 1.0)
            error = max(0.0, error - float(lost))
        self.items.append(Finding(what, error, bound, detail))

    def same(self, what: str, got: Any, want: Any) -> None:
        """``got`` and ``want`` hold the same values, bit for bit but for the sign of zero; NaN never passes."""
        a, b = to_float64(got), to_float64(want)
        if a.shape != b.shape:
            self.require(what, False, f"shape {list(a.shape)}, wanted {list(b.shape)}")
            return
        differ = a != b  # NaN differs from everything
        count = int(differ.sum())
        where = tuple(int(i) for i in np.argwhere(differ)[0]) if count else ()
        self.require(what, not count, f"{count} of {a.size} values differ, the first at {list(where)}")

    def untouched(self, what: str, got: Any, want: Any) -> None:
        """The very same bits, NaN payloads and zero signs included."""
        self.require(what, bits(got) == bits(want), "its memory was changed")

    def require(self, what: str, holds: bool, otherwise: str) -> None:
        """A property that holds or does not."""
        self.items.append(Finding(what, 0.0 if holds else float("inf"), 0.0, "" if holds else otherwise))

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.items if not f.ok]


def to_float64(x: Any) -> Any:
    """The exact values of an array of any kind, as a fresh float64 NumPy array."""
    from kdacore.oracle.host_values import to_float64 as convert

    return convert(x)


def bits(x: Any) -> bytes:
    """The values of an array of any kind as bytes."""
    if hasattr(x, "detach"):
        import torch

        flat = x.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return np.ascontiguousarray(np.asarray(x)).tobytes()
