"""Engines' captures of CUDA graphs on the CPU: launches are noted with their memory, and made at each replay.

``test_engine_captures_gpu.py`` does the same with torch's graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import engine_captures
import pytest
import torch
from cpu_graphs import CpuGraphs
from emulated_backend import NAME, registered
from engine_captures import DECODE, PREFILL


def _kda_first(ops: tuple[str, ...]) -> list[Any]:
    """The gated delta rule's are exhaustive: it has kernels of its own, and the same launches."""
    return [op if op.endswith("kda") else pytest.param(op, marks=pytest.mark.exhaustive) for op in ops]


@pytest.fixture
def graphs(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuGraphs]:
    with registered(*DECODE, *PREFILL):
        yield CpuGraphs(monkeypatch)


@pytest.mark.parametrize("op", _kda_first(DECODE))
def test_decoding(op: str, graphs: CpuGraphs, emulated: list[str]) -> None:
    engine_captures.decode_by_graphs(op, NAME, graphs)
    assert emulated


@pytest.mark.parametrize("op", DECODE)
def test_a_first_launch_inside_a_capture(op: str, graphs: CpuGraphs, emulated: list[str]) -> None:
    engine_captures.decode_without_a_warm_up(op, NAME, graphs)
    assert emulated


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "piecewise"])
@pytest.mark.parametrize("op", _kda_first(PREFILL))
def test_prompts(op: str, whole: bool, graphs: CpuGraphs, emulated: list[str]) -> None:
    engine_captures.prompts_by_graphs(op, NAME, graphs, whole=whole)
    assert emulated


def test_a_first_prompt_inside_a_capture(graphs: CpuGraphs, emulated: list[str]) -> None:
    engine_captures.prompts_by_graphs("chunk_kda", NAME, graphs, whole=True, warm_up=False)
    assert emulated


def test_prompts_and_decoding(graphs: CpuGraphs) -> None:
    engine_captures.prompts_and_decoding("chunk_kda", "fused_recurrent_kda", NAME, graphs)


# --- that the graphs on the CPU show what they are to show -----------------------------------------------------------


def test_nothing_is_run_while_it_is_captured(graphs: CpuGraphs) -> None:
    x, y = torch.ones(3), torch.zeros(3)

    def step() -> torch.Tensor:
        y.add_(x)
        return y * 2

    graph, made = graphs.capture(step)
    assert not y.any()
    for n in (1, 2):
        graph.replay()
        assert torch.equal(y, n * x) and torch.equal(made, 2 * n * x)


def test_what_a_cache_keeps_of_a_capture_is_lost(graphs: CpuGraphs) -> None:
    """A constant that is made inside one graph and used in another, or outside."""
    kept: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        kept or kept.append(torch.ones(3))
        return kept[0] + 1

    first, made = graphs.capture(step)
    second, later = graphs.capture(step)
    first.replay()
    assert torch.equal(made, torch.full((3,), 2.0))
    second.replay()
    assert later.isnan().all() and kept[0].isnan().all()


def test_reading_values_ends_a_capture(graphs: CpuGraphs) -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphs.capture(lambda: torch.ones(3).sum().item())
    assert graphs._open is None
