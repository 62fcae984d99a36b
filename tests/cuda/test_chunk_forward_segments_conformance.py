"""The conformance suite's inference cases of ``chunk_kda`` in segments, whose kernels the CPU emulates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_backend import registered, run_emulated, wide_inference_cases

from kdacore_cuda import choice
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths

QUICK = (
    "chunk_kda-causality_append-base",
    "chunk_kda-accuracy-collinear",
    "chunk_kda-pool-checkpoints_moved",
)
"""Cases that are run always; the others with the exhaustive tests."""


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call of K = V = 128 in segments of one chunk."""
    monkeypatch.setattr(choice, "use_segments", lambda *given: True)
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.uniform(1))
    with registered():
        yield


def test_some_cases(emulated: list[str]) -> None:
    cases = [c for c in wide_inference_cases() if c.id.startswith(QUICK)]
    assert len(cases) >= len(QUICK)
    run_emulated(cases, emulated, "output")


@pytest.mark.exhaustive
def test_every_case(emulated: list[str]) -> None:
    cases = wide_inference_cases()
    assert len(cases) > 40
    run_emulated(cases, emulated, "output")
