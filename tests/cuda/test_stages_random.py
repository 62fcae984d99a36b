"""Random calls of the training stages, on a ``cuda`` backend whose kernels the CPU emulates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from emulated_backend import NAME, Plugin

from kdacore.registry import REGISTRY
from kdacore.testing.random_cases import random_case
from kdacore.testing.suite import run_case

OPS = ("kda_chunk_intra", "kda_recompute_w_u")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    REGISTRY.register(Plugin(*OPS), NAME)
    yield
    REGISTRY.reset()


def run(seeds: Iterable[int], launched: list[str]) -> None:
    """Each call is right, declined, or one that must be refused; most are served, and each of those by a kernel."""
    counts: Counter[str] = Counter()
    problems = []
    for seed in seeds:
        launched.clear()
        result = run_case(random_case(NAME, seed, "cpu", calls="stages"))
        counts.update((result.status, result.case.op))
        if result.status == "failed":
            problems.append(f"seed {seed}: {result.message}\n{result.case}")
        # Every third call that must be refused follows valid ones like it.
        refused = result.status == "declined" or (result.case.check == "refusal" and seed % 3)
        assert bool(launched) == (not refused), f"seed {seed}: {launched}"
    assert not problems, "\n".join(problems)
    assert counts["served"] > 4 * counts["declined"]
    assert all(counts[op] for op in OPS)


REFUSED = 67
"""Seed of a call that must be refused."""


def test_some_calls(emulated: list[str]) -> None:
    assert random_case(NAME, REFUSED, "cpu", calls="stages").check == "refusal"
    run([*range(5), REFUSED], emulated)


@pytest.mark.exhaustive
def test_many_calls(emulated: list[str]) -> None:
    run(range(5, 300), emulated)
