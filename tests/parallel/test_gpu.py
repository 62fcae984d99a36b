"""Ranks on GPUs: threads of one process on one, and processes over NCCL where there are two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_calls
import torch
from thread_ranks import on_threads

import kdacore
from kdacore.calls.values import Shape
from kdacore.testing.cases import MODEL

pytestmark = pytest.mark.gpu
RANK = Path(__file__).with_name("nccl_rank.py")


def cases(size: int, backend: str) -> list[Any]:
    """bfloat16 calls that the backend serves, over rows that cross the ranks."""
    T = size * 192

    def made(note: str, op: str = "chunk_kda", **fields: Any) -> Any:
        lengths = fields.pop("lengths", ())
        shape = Shape(T=T, H=2, HV=fields.pop("HV", 2), K=128, V=128, lengths=lengths)
        options = {"gates": "init", "factor": 2.0} | fields
        return rank_calls.case(op, shape=shape, dtype="bfloat16", backend=backend, note=note, **options)

    crossing = (5, 0, 1, T - 6 - 17, 0, 17)
    return [
        made("row", **MODEL),
        made("slow", gates="slow", use_qk_l2norm_in_kernel=True),
        made("pack", lengths=crossing, **MODEL),
        made("grouped", HV=4, lengths=(150, T - 150), state_v_first=True, **MODEL),
        made("gdn", op="chunk_gated_delta_rule", lengths=crossing, use_qk_l2norm_in_kernel=True),
    ]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("at", range(5))
def test_threads(backend: str, at: int) -> None:
    whole = cases(3, backend)[at]
    arrays = rank_calls.share(whole, 3, 0, "cuda")
    if not kdacore.explain(whole.op, **arrays, **dict(whole.options), cp=3, backend=backend).backend:
        pytest.skip(f"{backend} does not serve {whole.op}")

    def work(ranks: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()), kdacore.record_selections() as ran:
            found = rank_calls.run_rank(whole, ranks, 3, ranks.rank, "cuda")
        assert [s.backend for s in ran] == [backend]
        return found

    rank_calls.check(whole, on_threads(3, work))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_rank_of_a_pretended_group(rank: int, tmp_path: Path) -> None:
    """It can be captured and compiled, and does not synchronise."""
    checks = ("fake", "synchronisation", "captured", "compiled")
    command = [sys.executable, str(RANK), str(rank), "3", str(tmp_path), *checks]
    subprocess.run(command, check=True, timeout=300)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_over_nccl(tmp_path: Path) -> None:
    size = min(torch.cuda.device_count(), 4)
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(size), str(tmp_path)], env=os.environ.copy()
        )
        for rank in range(size)
    ]
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0] * size
