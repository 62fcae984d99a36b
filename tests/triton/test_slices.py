"""Calls with ``cp=`` on the Triton backend: ranks as threads, against the float64 oracle on the whole row."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kdacore import record_selections
from kdacore.parallel import local_group
from kdacore.parallel.local_ranks import LocalRanks
from kdacore_triton import chunk_forward_plan, configs, slices

sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))
import rank_calls

_TURN = threading.RLock()


@pytest.fixture(autouse=True)
def one_rank_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter serves one thread: the others wait until it meets them."""
    meet = LocalRanks._meet

    def wait(ranks: LocalRanks) -> None:
        _TURN.release()
        try:
            meet(ranks)
        finally:
            _TURN.acquire()

    monkeypatch.setattr(LocalRanks, "_meet", wait)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of one chunk, so that few tokens make many."""
    monkeypatch.setattr(chunk_forward_plan, "SLICE_SEGMENT", 16)
    configs._changed()
    yield
    monkeypatch.undo()
    configs._changed()


def run(case: Any, ranks: int, device: str) -> list[dict[str, Any]]:
    group = local_group(ranks)

    def share(rank: int) -> dict[str, Any]:
        with _TURN, torch.autograd.set_multithreading_enabled(False), record_selections() as made:
            found = rank_calls.run_rank(case, group[rank], ranks, rank, device)
        assert [s.backend for s in made] == ["triton"]
        return found

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(share, range(ranks)))


def case_of(note: str, ranks: int) -> Any:
    (found,) = (c for c in rank_calls.cases(ranks) if c.note == note)
    # Triton's kernels have no narrower V.
    return dataclasses.replace(found, backend="triton", shape=dataclasses.replace(found.shape, V=20))


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("note", "ranks"),
    [
        ("crossing", 3),
        pytest.param("gdn-crossing", 2, marks=EXHAUSTIVE),
        pytest.param("rows", 2, marks=EXHAUSTIVE),
        pytest.param("grouped", 3, marks=EXHAUSTIVE),
        pytest.param("no-decay", 4, marks=EXHAUSTIVE),
        pytest.param("at-the-border", 3, marks=EXHAUSTIVE),
        pytest.param("padding", 3, marks=EXHAUSTIVE),
        pytest.param("gdn", 2, marks=EXHAUSTIVE),
        pytest.param("mixed", 4, marks=EXHAUSTIVE),
    ],
)
def test_against_the_oracle(note: str, ranks: int, device: str) -> None:
    case = case_of(note, ranks)
    rank_calls.check(case, run(case, ranks, device))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("K", "V"), [(96, 192), (256, 512)])
def test_head_dims_of_models(K: int, V: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has launches of its own for slices, the second is composed of whole calls."""
    monkeypatch.setattr(chunk_forward_plan, "SLICE_SEGMENT", 32)  # chunks of so wide keys have 32 rows here
    configs._changed()
    case = case_of("gdn-crossing", 2)
    case = dataclasses.replace(case, shape=dataclasses.replace(case.shape, K=K, V=V))
    rank_calls.check(case, run(case, 2, device))


def test_wide_keys_are_composed_of_whole_calls() -> None:
    class Wide:
        K = 256

    assert slices.slice_functions(Wide()) is None  # type: ignore[arg-type]
