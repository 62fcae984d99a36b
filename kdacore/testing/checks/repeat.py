"""The same call gives the same bits, for good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdacore.testing.cases import Case
from kdacore.testing.checks.gradients import place_weights, run
from kdacore.testing.checks.memory import check_memory
from kdacore.testing.compare import Findings, bits
from kdacore.testing.expected import weights
from kdacore.testing.poisoned_arrays import arrays, place
from kdacore.testing.run_call import forward, watched

REPEATS = 3


def determinism(case: Case, findings: Findings) -> None:
    """Forward results of the same inputs, several times, in fresh memory."""

    def call(of: Case) -> dict[str, Any]:
        placed = place(of)
        results = forward(of, arrays(placed))
        check_memory(of, placed, results, findings)
        return results

    with watched(case, findings):
        _measure(case, findings, call)


def gradient_determinism(case: Case, findings: Findings) -> None:
    """Gradients of the same inputs, several times."""

    def call(of: Case) -> dict[str, Any]:
        placed = place(of)
        results, found = run(of, placed, place_weights(of, weights(of)), findings)
        named = {**results, **{f"gradient of {n}": x for n, x in found.items()}}
        check_memory(of, placed, named, findings)
        return named

    _measure(case, findings, call)


def _measure(case: Case, findings: Findings, call: Callable[[Case], dict[str, Any]]) -> None:
    """Every run gives the same bits, and what it returned stays as it was while others run."""
    runs = []
    for _ in range(REPEATS):
        results = call(case)
        runs.append((results, {name: bits(x) for name, x in results.items()}))
    call(replace(case, seed=case.seed + 1))  # other numbers: in a buffer that is used again they show
    for name, first in runs[0][1].items():
        repeats = all(was[name] == first for _, was in runs[1:])
        findings.require(f"{name} repeats", repeats, "other bits the next time")
        stays = all(bits(results[name]) == was[name] for results, was in runs)
        findings.require(f"{name} stays", stays, "a later call changed it")
