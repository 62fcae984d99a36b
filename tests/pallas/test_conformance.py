"""A handful of the conformance suite, one for each kind of promise; ``kdacore verify xla`` runs all
500."""

from __future__ import annotations

from functools import cache

import pytest

from kdacore.testing.cases import Case
from kdacore.testing.matrix import plan
from kdacore.testing.random_cases import random_case
from kdacore.testing.suite import run_case

PICKED = (
    "chunk_kda-accuracy-floor_gates-jax-float32",
    "chunk_kda-causality-mixed-jax-float32",
    "chunk_kda-split_decode-base-jax-float32",
    "chunk_kda-pool-checkpoints_moved-jax-float32",
    "chunk_gated_delta_rule-gradients-collinear-jax-float32",
    "fused_recurrent_kda-pool-indexed_negative-jax-float32",
    "fused_recurrent_gated_delta_rule-drift-neg_eigval-jax-float32",
    "kda_gate-gradients-bounded_no_A_log-jax-float32",
    "kda_chunk_intra-accuracy-collinear-jax-float32",
    "delta_rule_chunk_state-accuracy-collinear-jax-float32",
)


@cache
def cases() -> dict[str, Case]:
    return {case.id: case for case in plan("xla", device="cpu", level="quick", kinds=("jax",)).cases}


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", PICKED)
def test_case(name: str) -> None:
    result = run_case(cases()[name])
    assert result.status == "served", result.message


@pytest.mark.parametrize("seed", range(3))
def test_random_call_of_a_stage(seed: int) -> None:
    result = run_case(random_case("xla", seed, "cpu", calls="stages"))
    assert result.status == "served", result.message
