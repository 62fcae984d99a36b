"""The conformance suite's gradient cases, on a ``cuda`` backend whose kernels the CPU emulates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_backend import NAME, Plugin, run_emulated

from kdacore.registry import REGISTRY
from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.serving import judge

QUICK = (
    "chunk_kda-gradients-collinear",  # kg in one part: dv beyond its bound
    "chunk_kda-gradient_causality-base",  # running sums made as a later one less its own term
)
"""Cases that something failed once; the others are run with the exhaustive tests."""


@pytest.fixture
def registered() -> Iterator[None]:
    REGISTRY.register(Plugin(), NAME)
    yield
    REGISTRY.reset()


def served() -> list[Case]:
    cases = matrix.plan(NAME, device="cpu", kinds=("torch",)).cases
    wanted = [c for c in cases if c.check in matrix.DIFFERENTIATES and c.mode == "eager"]
    return [c for c in wanted if not judge(c)]


def test_cases_that_failed_once(emulated: list[str], registered: None) -> None:
    cases = [c for c in served() if c.id.startswith(QUICK)]
    assert len(cases) >= len(QUICK)
    run_emulated(cases, emulated, "grads")


@pytest.mark.exhaustive
def test_every_case(emulated: list[str], registered: None) -> None:
    cases = served()
    assert len(cases) > 25
    run_emulated(cases, emulated, "grads")
