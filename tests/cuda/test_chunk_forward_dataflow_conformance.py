"""The conformance suite's inference cases of ``chunk_kda`` in two launches side by side, whose kernels the CPU
emulates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_backend import registered, run_emulated, wide_inference_cases

from kdacore.testing.cases import Case
from kdacore_cuda import chunk_forward

QUICK = ("chunk_kda-causality_append-base", "chunk_kda-accuracy-collinear")
"""Cases that are run always; the others with the exhaustive tests."""


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every dense call of K = V = 128 side by side."""
    monkeypatch.setattr(chunk_forward, "use_dataflow", lambda *args: True)
    with registered():
        yield


def served() -> list[Case]:
    """The cases with the head dim that this serves, but packs and pools."""
    return [c for c in wide_inference_cases() if not (c.shape.lengths or c.pool)]


def test_some_cases(emulated: list[str]) -> None:
    cases = [c for c in served() if c.id.startswith(QUICK)]
    assert len(cases) >= len(QUICK)
    run_emulated(cases, emulated, "walk")


@pytest.mark.exhaustive
def test_every_case(emulated: list[str]) -> None:
    cases = served()
    assert len(cases) > 40
    run_emulated(cases, emulated, "walk")
