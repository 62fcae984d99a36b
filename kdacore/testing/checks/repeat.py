"""The same call gives the same bits; where declared, so does a sequence alone and packed with others."""

from __future__ import annotations

import itertools
from typing import Any

from kdacore.testing.cases import Case
from kdacore.testing.checks.gradients import place_weights, run
from kdacore.testing.compare import Findings, bits
from kdacore.testing.data import host_values
from kdacore.testing.expected import weights
from kdacore.testing.invoke import forward, watched
from kdacore.testing.parts import alone
from kdacore.testing.place import arrays, place

REPEATS = 3


def determinism(case: Case, findings: Findings) -> None:
    """Forward results of the same inputs, several times, in fresh memory."""
    with watched(case, findings):
        runs = [_bits(forward(case, arrays(place(case)))) for _ in range(REPEATS)]
    _all_equal(runs, findings)


def gradient_determinism(case: Case, findings: Findings) -> None:
    """Gradients of the same inputs, several times."""
    runs = []
    for _ in range(REPEATS):
        results, found = run(case, place(case), place_weights(case, weights(case)), findings)
        runs.append(_bits({**results, **{f"gradient of {n}": x for n, x in found.items()}}))
    _all_equal(runs, findings)


def _bits(results: dict[str, Any]) -> dict[str, bytes]:
    return {name: bits(x) for name, x in results.items()}


def _all_equal(runs: list[dict[str, bytes]], findings: Findings) -> None:
    for name, first in runs[0].items():
        findings.require(
            f"{name} repeats", all(r[name] == first for r in runs[1:]), "other bits the next time"
        )


def batch_invariance(case: Case, findings: Findings) -> None:
    """Each sequence of a pack in a call of its own: the same bits."""
    values = host_values(case)
    with watched(case, findings):
        packed = forward(case, arrays(place(case, values)))
    starts = values["cu_seqlens"]
    singles = iter(alone(case))
    for n, (start, end) in enumerate(itertools.pairwise(starts)):
        if start == end:
            continue
        here = {
            name: x[:, start:end] if name in ("q", "k", "v", "g", "beta") else x
            for name, x in values.items()
            if name != "cu_seqlens"
        }
        if "initial_state" in here:
            here["initial_state"] = here["initial_state"][n : n + 1]
        single = next(singles)
        with watched(single, findings):
            results = forward(single, arrays(place(single, here)))
        findings.same(f"o of sequence {n} alone", results["o"], packed["o"][:, start:end])
        if "final_state" in results:
            findings.same(
                f"state of sequence {n} alone", results["final_state"], packed["final_state"][n : n + 1]
            )
