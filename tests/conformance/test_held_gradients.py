"""Gradients of a gate in float16, which are held to the largest number, against the oracle's, which are not."""

from __future__ import annotations

import numpy as np
import pytest

from kdacore.testing.checks.gradients import held_to_float16
from kdacore.testing.compare import Findings
from kdacore.testing.fuzz import Task, run_seed
from kdacore.testing.random_limits import Limits

WANT = np.array([1e38, -1e38, 0.0, 3e38])
MOST = 65504.0


def ok(got: list[float], want: np.ndarray = WANT) -> bool:
    findings = Findings()
    findings.close("gradient of g", *held_to_float16(np.array(got), want, 0.016), 0.016, "float16")
    return not findings.failures


@pytest.mark.parametrize("noise", [0.0, 12.0, MOST, -MOST])
def test_rounding_errors_of_huge_gradients_are_not_judged(noise: float) -> None:
    assert ok([MOST, -MOST, noise, MOST])


@pytest.mark.parametrize(
    "got",
    [[-MOST, -MOST, 0.0, MOST], [MOST, -MOST, float("nan"), MOST], [0.0] * 4, [MOST, -MOST, 0.0, np.inf]],
)
def test_wrong_ones_are_seen(got: list[float]) -> None:
    assert not ok(got)


def test_gradients_of_usual_size_are_all_judged() -> None:
    want = np.array([1.0, -2.0, 0.0, 3.0])
    assert ok([1.0, -2.0, 0.0, 3.0], want)
    assert not ok([1.0, -2.0, 1.0, 3.0], want)


def test_random_calls_that_reach_it() -> None:
    """First tokens have gradients of 0, and the largest rate makes something of their rounding errors."""
    task = Task("reference", "cpu", "quick", limits=Limits(together=20))
    assert [run_seed(task, seed)["status"] for seed in (3523, 3805)] == ["served", "served"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_lost_of_gradients_near_the_smallest_number(dtype: str) -> None:
    """A gate of sigmoid exp(-92) has gradients of 1e-36: 0 in arithmetic that flushes subnormal numbers."""

    def holds(got: float, want: float) -> bool:
        findings = Findings()
        findings.close("gradient of g", np.array([got]), np.array([want]), 1e-4, dtype)
        return not findings.failures

    assert holds(0.0, 8.7e-36)
    assert not holds(0.0, 1e-29)
    assert not holds(1e-29, 3e-29)
    assert not holds(float("nan"), 8.7e-36)


def test_random_calls_of_gates_that_nearly_stand_still() -> None:
    pytest.importorskip("jax")
    task = Task("xla", "cpu", "quick", limits=Limits(together=50))
    assert run_seed(task, 9376)["status"] == "served"
