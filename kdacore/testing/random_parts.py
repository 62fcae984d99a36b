"""What random calls of whole ops and of stages draw alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kdacore.calls.values import GATES
from kdacore.testing.capabilities import representable
from kdacore.testing.cases import Case
from kdacore.testing.matrix import Level

END_GATES = ("still", "steep")
"""Distributions of gates at the ends of float32."""
USUAL_GATES = tuple(name for name in GATES if name not in END_GATES)


def pick(rng: Any, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def usable_dtypes(case: Case) -> list[str]:
    """16- and 32-bit floats that arrays of the case's kind have here."""
    return [d for d in ("float32", "bfloat16", "float16") if representable(case.kind, d)]


def index_dtype(case: Case, rng: Any) -> str:
    return "int32" if case.kind == "jax" else str(pick(rng, "int32", "int64"))


def draw_memory(case: Case, rng: Any, level: Level) -> Case:
    layout = pick(rng, "contiguous", "contiguous", "padded", "stepped", "transposed")
    return replace(case, layout="contiguous" if case.kind == "jax" else layout)
