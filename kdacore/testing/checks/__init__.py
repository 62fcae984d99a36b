"""The checks: plain functions from a case to what they measured. ``CHECKS`` names them all."""

from __future__ import annotations

from collections.abc import Callable

from kdacore.testing.cases import Case
from kdacore.testing.checks.accuracy import accuracy
from kdacore.testing.compare import Findings

Check = Callable[[Case, Findings], None]

CHECKS: dict[str, Check] = {
    "accuracy": accuracy,
}
