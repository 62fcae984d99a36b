"""Compiled programs are kept for the last few requests only; dropped ones free their memory."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from pallas_cases import Case, build, to_jax

from kdacore_pallas.program_cache import MAX_PROGRAMS, compiled_program
from kdacore_pallas.xla import chunk_forward, entry_points


def programs() -> int:
    return len(jax.devices("cpu")[0].client.live_executables())


@pytest.mark.exhaustive
def test_dropped_programs_leave_the_process() -> None:
    """A program holds hundreds of memory maps and a process may have 65530: a leak ends in a crash."""
    compiled_program.cache_clear()
    calls_made = [build(Case(T=T, K=8, V=8, HV=1, gates="random")) for T in range(1, 7)]
    for _, inputs in calls_made:  # copying inputs in compiles nothing from here on
        to_jax(inputs)
    before = programs()
    for request, inputs in calls_made:
        entry_points.chunk_forward(request, to_jax(inputs))
    assert compiled_program.cache_info().currsize == len(calls_made)
    held = programs() - before
    compiled_program.cache_clear()
    assert held >= len(calls_made)
    assert programs() - before <= held - len(calls_made)


def test_the_least_recently_used_goes_first() -> None:
    compiled_program.cache_clear()
    for scale in np.linspace(0.1, 1.0, MAX_PROGRAMS + 3):
        request, _ = build(Case(T=1, K=8, V=8, HV=1))
        compiled_program(
            chunk_forward.forward, entry_points._traced_request(replace(request, scale=float(scale)))
        )
    assert compiled_program.cache_info().currsize == MAX_PROGRAMS
    compiled_program.cache_clear()
