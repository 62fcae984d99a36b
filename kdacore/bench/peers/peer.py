"""What the bench has to know of a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kdacore.bench.arrays import Arrays
from kdacore.bench.cases import Case

Call = Callable[[Arrays], tuple[Any, Any]]
"""Output and final state of a case's arrays."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One installed distribution that computes the same thing."""

    distribution: str
    build: Callable[[Case], Call]
    """Imports it. The call it returns takes what kdacore's own call takes and is timed whole."""
    refusal: Callable[[Case], str]
    """Why it cannot serve a case, empty when it can."""
    note: Callable[[Case], str]
    """What of the row's time is not its own kernels' fused work, empty when nothing is worth saying."""


def missing(*conditions: tuple[bool, str]) -> str:
    """The requirements whose condition does not hold."""
    return "; ".join(text for holds, text in conditions if not holds)
