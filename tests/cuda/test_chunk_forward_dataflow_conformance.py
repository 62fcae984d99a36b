"""The conformance suite's inference cases of ``chunk_kda`` in two launches side by side, whose kernels the CPU
emulates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_backend import dense_inference_cases, registered, run_emulated

from kdacore_cuda import choice

QUICK = ("chunk_kda-causality_append-base", "chunk_kda-accuracy-collinear")
"""Cases that are run always; the others with the exhaustive tests."""


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every dense call of K = V = 128 side by side."""
    monkeypatch.setattr(choice, "use_dataflow", lambda *args: True)
    with registered():
        yield


def test_some_cases(emulated: list[str]) -> None:
    cases = [c for c in dense_inference_cases() if c.id.startswith(QUICK)]
    assert len(cases) >= len(QUICK)
    run_emulated(cases, emulated, "walk")


@pytest.mark.exhaustive
def test_every_case(emulated: list[str]) -> None:
    cases = dense_inference_cases()
    assert len(cases) > 40
    run_emulated(cases, emulated, "walk")
