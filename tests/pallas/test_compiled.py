"""Compiled programs are kept for the last few requests only, and really given up."""

from __future__ import annotations

import jax
import numpy as np
from pallas_cases import Case, build, to_jax

from kdacore_pallas import calls
from kdacore_pallas.compiled import KEPT, compiled


def programs() -> int:
    return len(jax.devices("cpu")[0].client.live_executables())


def test_dropped_programs_leave_the_process() -> None:
    """A program holds hundreds of memory maps and a process may have 65530: a leak ends in a crash."""
    compiled.cache_clear()
    calls_made = [build(Case(T=T, K=8, V=8, HV=1, gates="random")) for T in range(1, 7)]
    for _, inputs in calls_made:  # copying inputs in compiles nothing from here on
        to_jax(inputs)
    before = programs()
    for request, inputs in calls_made:
        calls.chunk_forward(request, to_jax(inputs))
    assert compiled.cache_info().currsize == len(calls_made)
    held = programs() - before
    compiled.cache_clear()
    assert held >= len(calls_made)
    assert programs() - before <= held - len(calls_made)


def test_the_least_recently_used_goes_first() -> None:
    compiled.cache_clear()
    for scale in np.linspace(0.1, 1.0, KEPT + 3):
        request, _ = build(Case(T=1, K=8, V=8, HV=1))
        compiled(calls.chunk.forward, calls._traced_request(calls.replace(request, scale=float(scale))))
    assert compiled.cache_info().currsize == KEPT
    compiled.cache_clear()
