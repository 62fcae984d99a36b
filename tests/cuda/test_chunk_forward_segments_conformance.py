"""The conformance suite's inference cases of ``chunk_kda`` in segments, whose kernels the CPU emulates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from emulated_backend import NAME, Plugin, run_emulated

from kdacore.registry import REGISTRY
from kdacore.testing import matrix
from kdacore.testing.cases import Case
from kdacore.testing.serving import judge
from kdacore_cuda import chunk_forward, segment_lengths
from kdacore_cuda.segment_lengths import SegmentLengths

QUICK = (
    "chunk_kda-causality_append-base",
    "chunk_kda-accuracy-collinear",
    "chunk_kda-pool-checkpoints_moved",
)
"""Cases that are run always; the others with the exhaustive tests."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call of K = V = 128 in segments of one chunk."""
    monkeypatch.setattr(chunk_forward, "use_segments", lambda *given: True)
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(1))
    REGISTRY.register(Plugin(), NAME)
    yield
    REGISTRY.reset()


def served() -> list[Case]:
    """The cases with the head dim that this serves."""
    cases = matrix.plan(NAME, device="cpu", kinds=("torch",)).cases
    plain = [
        c for c in cases if c.op == "chunk_kda" and c.check not in matrix.DIFFERENTIATES and c.mode == "eager"
    ]
    cases = [c for c in plain if not judge(c)]
    wide = [dataclasses.replace(c, shape=dataclasses.replace(c.shape, K=128, V=128)) for c in cases]
    return [c for c in wide if not judge(c)]


def test_some_cases(emulated: list[str]) -> None:
    cases = [c for c in served() if c.id.startswith(QUICK)]
    assert len(cases) >= len(QUICK)
    run_emulated(cases, emulated, "output")


@pytest.mark.exhaustive
def test_every_case(emulated: list[str]) -> None:
    cases = served()
    assert len(cases) > 40
    run_emulated(cases, emulated, "output")
