"""The conformance suite's cases of calls from JAX, whose kernels the CPU emulates."""

from __future__ import annotations

import pytest
from emulated_backend import NAME
from jax_emulation import Device

from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.serving import judge
from kdacore.testing.suite import run_case

QUICK = (
    *("chunk_kda-accuracy-jit-", "chunk_kda-causality_append-base", "chunk_gated_delta_rule-accuracy-jit-"),
    "fused_recurrent_kda-pool",
)
"""Cases that are run always, one of each; the others with the exhaustive tests. The first has heads for which there is
no backward: traced, and differentiated by nobody, it is served."""


def served() -> list[Case]:
    """What the backend says it serves."""
    return [c for c in matrix.plan(NAME, device="cpu", kinds=("jax",)).cases if not judge(c)]


def run_all(cases: list[Case], device: Device) -> None:
    for case in cases:
        device.launched.clear()
        result = run_case(case)
        assert result.status == "served", f"{case.id}\n{result.message}"
        assert device.launched, case.id


def test_some_cases(from_jax: Device) -> None:
    cases = served()
    some = [next(c for c in cases if c.id.startswith(start)) for start in QUICK]
    run_all(some, from_jax)


@pytest.mark.exhaustive
def test_every_case(from_jax: Device) -> None:
    cases = served()
    assert len(cases) > 100
    run_all(cases, from_jax)
