"""Many launches whose blocks tell each other through remote arrivals, on a GPU: every one must have the same bits.

An arrival at another block's barrier names no scope (csrc/common/ptx.cuh says why, and what is assumed). Were a stage
overwritten before a warp has read it, a launch would now and then differ.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, request_of
from form_calls import grid_of

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward

pytestmark = pytest.mark.gpu

LAUNCHES = 1500
"""For a gap of one launch in 30,000 (docs/lab/cuda.md) `benchmarks.launch_stress` makes more."""


def draw(T: int, H: int) -> ChunkInputs:
    d = Draw(T + H, device="cuda")
    tokens = {name: d.normal(1, T, H, 128) for name in ("q", "k", "v")}
    gate = {name: x.cuda() for name, x in d.gate("init", 1, T, H, 128).items()}
    return ChunkInputs(**tokens, beta=d.normal(1, T, H), **gate)


def other_work(stream: torch.cuda.Stream, on: torch.Tensor) -> None:
    """Copies on another stream, so that blocks of a cluster wait for memory at different times."""
    with torch.cuda.stream(stream):
        for _ in range(4):
            on.copy_(on.flip(0))


@pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize(
    ("cluster", "clusters", "helpers", "H", "T"),
    [(2, 0, 0, 48, 700), (2, 66, 0, 80, 400), (2, 0, 18, 48, 700), (4, 0, 0, 28, 700), (4, 0, 6, 24, 700)],
    ids=["twos", "twos, cut", "twos, helped", "fours", "fours, helped"],
)
@pytest.mark.parametrize("busy", [False, True], ids=["alone", "beside copies"])
def test_every_launch_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    cluster: int,
    clusters: int,
    helpers: int,
    H: int,
    T: int,
    busy: bool,
) -> None:
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    monkeypatch.setattr(choice, "use_dataflow", lambda *given: False)
    monkeypatch.setattr(choice, "cluster_size", lambda *given: cluster)
    monkeypatch.setattr(choice, "resident_clusters", lambda *given: clusters)
    monkeypatch.setattr(choice, "preparing_clusters", lambda *given: helpers)
    inputs = draw(T, H)
    request = request_of("chunk_kda", inputs, output_final_state=True, **options)
    assert grid_of(request) == ((clusters or H) + helpers) * cluster

    def run() -> Outputs:
        return chunk_forward.forward(request, inputs)

    first, stream = run(), torch.cuda.Stream()
    memory = torch.zeros(1 << 24, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(LAUNCHES):
        if busy and i % 8 == 0:
            other_work(stream, memory)
        got = run()
        wrong += (got.o != first.o).any() | (got.final_state != first.final_state).any()
    assert int(wrong) == 0
