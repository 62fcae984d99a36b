"""The check of CUDA graphs, held to a replay that runs the captured call again on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kdacore.calls.arrays import host_values, rows_of
from kdacore.errors import ContractError
from kdacore.testing.cases import Case
from kdacore.testing.checks import graphs
from kdacore.testing.compare import Findings
from kdacore.testing.matrix import apply, plan
from kdacore.testing.variations import variations_of

torch = pytest.importorskip("torch")

OPS = {"chunk_kda": "chunk", "fused_recurrent_kda": "recurrent"}
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def cases() -> list[Case]:
    found = []
    for op, family in OPS.items():
        base = next(
            c for c in plan("reference", kinds=("torch",)).cases if (c.op, c.check) == (op, "accuracy")
        )
        for v in variations_of(op, family):
            if v.check == "graph" and (made := _on_cpu(base, v)) is not None:
                found.append(made)
    return found


def _on_cpu(base: Case, v: Any) -> Case | None:
    """The case that the suite makes on CUDA alone, here."""
    import dataclasses

    made = apply(base, dataclasses.replace(v, check="accuracy"))
    return None if made is None else dataclasses.replace(made, check="graph")


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Change], None]]:
    """Stands in for CUDA: a replay computes the captured call again, in place. ``change`` breaks it."""
    captured: list[Any] = []
    plain = graphs.forward
    broken: list[Change] = []

    def forward(case: Case, given: dict[str, Any]) -> dict[str, Any]:
        results = plain(case, given)
        captured[:] = [(case, given, results)]
        return results

    class Graph:
        def replay(self) -> None:
            case, given, results = captured[0]
            seen = dict(given)
            for change in broken:
                change(seen, given)
            for name, x in plain(case, seen).items():
                if x is not results[name]:
                    results[name].copy_(x)

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    monkeypatch.setattr(graphs, "forward", forward)
    for name, stand_in in (
        ("CUDAGraph", Graph),
        ("Stream", Stream),
        ("current_stream", Stream),
        ("synchronize", lambda: None),
        ("stream", lambda s: contextlib.nullcontext()),
        ("graph", lambda g: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield broken.append


CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=[c.id for c in CASES])
def test_a_replay_that_reads_everything_again_passes(case: Case, replay: Any) -> None:
    findings = Findings()
    graphs.graph(case, findings)
    assert findings.items and not findings.failures


@pytest.mark.parametrize("name", ["cu_seqlens", "state_indices", "write_indices", "checkpoint_offsets", "v"])
def test_a_replay_of_what_was_captured_fails(name: str, replay: Any) -> None:
    """Offsets or rows that were read on the host while the graph was captured."""
    case = next(c for c in CASES if c.pool == "checkpoints_moved" and c.op == "chunk_kda")
    kept: dict[str, Any] = {}

    def stale(seen: dict[str, Any], given: dict[str, Any]) -> None:
        seen[name] = kept.setdefault(name, torch.as_tensor(host_values(case)[name]).to(given[name].dtype))

    replay(stale)
    findings = Findings()
    try:
        graphs.graph(case, findings)
        failed = bool(findings.failures)
    except ContractError:  # the reference reads the rows: what was kept and what is new do not fit together
        failed = True
    assert failed


def test_what_changes_between_replays() -> None:
    """Lengths, how much padding there is, and which sequences have no slot."""
    import dataclasses

    case = next(c for c in CASES if c.pool == "checkpoints_moved")
    other = dataclasses.replace(case, seed=case.seed + 1, shape=graphs.other_lengths(case.shape))
    assert other.shape.T == case.shape.T and other.shape.padding > case.shape.padding
    assert other.shape.lengths != case.shape.lengths and other.shape.N == case.shape.N
    here, there = (rows_of(c, host_values(c)) for c in (case, other))
    assert (here.padding != there.padding).any() and (here.final != there.final).any()
    shapes = [{n: x.shape for n, x in host_values(c).items()} for c in (case, other)]
    assert shapes[0] == shapes[1]
