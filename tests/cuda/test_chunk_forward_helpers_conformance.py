"""The conformance suite's inference cases of ``chunk_kda`` in clusters with helpers, which the CPU emulates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_backend import dense_inference_cases, registered, run_emulated

from kdacore.testing.cases import Case
from kdacore_cuda import choice

QUICK = ("chunk_kda-causality_append-base", "chunk_kda-accuracy-collinear")
"""Cases that are run always; the others with the exhaustive tests."""


@pytest.fixture(autouse=True, params=[2, 4])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every dense call of K = V = 128 with helpers, whatever its heads and tokens. With half as many helpers as items,
    clusters of two get half of their steps from them."""
    size = request.param
    monkeypatch.setattr(choice, "use_dataflow", lambda *args: False)
    monkeypatch.setattr(choice, "use_segments", lambda *args: False)
    monkeypatch.setattr(choice, "cluster_size", lambda *args: size)
    monkeypatch.setattr(choice, "resident_clusters", lambda *args: 0)
    monkeypatch.setattr(choice, "preparing_clusters", lambda items, *rest: -(-items // 4))
    monkeypatch.setattr(choice, "prepared_share", lambda *args: 0.5)
    with registered():
        yield


def run_with_helpers(cases: list[Case], launched: list[str]) -> None:
    for case in cases:
        run_emulated([case], launched, "chunk_forward")
        assert any("-HELPERS1" in name for name in launched), case.id


def test_some_cases(emulated: list[str]) -> None:
    cases = [c for c in dense_inference_cases() if c.id.startswith(QUICK)]
    assert len(cases) >= len(QUICK)
    run_with_helpers(cases, emulated)


@pytest.mark.exhaustive
def test_every_case(emulated: list[str]) -> None:
    cases = dense_inference_cases()
    assert len(cases) > 40
    run_with_helpers(cases, emulated)
