"""The backward in segments on a GPU: against the oracle and the one chain per head, equal bits, graphs, causality."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, error, request_of

from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda import chunk_backward, chunk_backward_segments
from kdacore_reference.oracle import oracle_backward

pytestmark = pytest.mark.gpu

BOUND = 8e-3
GATES = pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
PACK = [0, 1, 63, 64, 0, 700, 512, 300, 65]


def on_gpu(inputs: ChunkInputs) -> ChunkInputs:
    return ChunkInputs(*(None if x is None else x.cuda() for x in inputs))


def state(*shape: int) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=torch.float32)


def packed() -> ChunkInputs:
    cu = torch.tensor(np.cumsum([0, *PACK]), dtype=torch.int32)
    return draw(sum(PACK), 1, 1, cu_seqlens=cu, initial_state=state(len(PACK), 1))


CASES = {
    "dense": lambda: draw(1500, 2, 2, initial_state=state(1, 2)),
    "packed": packed,
    "grouped": lambda: draw(700, 1, 2, B=2, initial_state=state(2, 2)),
}


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_backward_segments, "chunks_per_segment", lambda *given: 2)


def same(a: InputGrads, b: InputGrads) -> bool:
    return all(x is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@GATES
@pytest.mark.parametrize("name", CASES)
def test_the_whole_against_the_oracle(short_segments: None, name: str, options: dict[str, Any]) -> None:
    """Memory that a call gets is NaN, and every call gives the same bits."""
    inputs = CASES[name]()
    request = request_of("chunk_kda", inputs, output_final_state=True, **options)
    d = Draw(5)
    given = OutputGrads(d.normal(*inputs.v.shape), d.normal(*request.state_shape, dtype=torch.float32))
    want = oracle_backward(request, inputs, given)
    there = on_gpu(inputs)
    request = request_of("chunk_kda", there, output_final_state=True, **options)
    moved = OutputGrads(*(None if x is None else x.cuda() for x in given))
    assert chunk_backward.scan_of(request, there.q).launches[0].name == "maps"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = chunk_backward.backward(request, there, (), moved)
        assert all(same(chunk_backward.backward(request, there, (), moved), got) for _ in range(20))
    finally:
        torch.use_deterministic_algorithms(False)
    for k in InputGrads._fields:
        mine, exact = getattr(got, k), getattr(want, k)
        assert (mine is None) == (exact is None)
        if mine is not None:
            assert error(mine, exact) < 2 * BOUND, k


def large(T: int, H: int) -> tuple[Any, ChunkInputs, OutputGrads]:
    d = Draw(T, device="cuda")
    tokens = {name: d.normal(1, T, H, 128) for name in ("q", "k", "v")}
    gate = {name: x.cuda() for name, x in d.gate("init", 1, T, H, 128).items()}
    inputs = ChunkInputs(**tokens, beta=d.normal(1, T, H), **gate)
    return request_of("chunk_kda", inputs, **BOUNDED_MODEL), inputs, OutputGrads(d.normal(1, T, H, 128))


@pytest.mark.parametrize("H", [1, 4, 8])
def test_large_calls_agree_with_one_chain_per_head(monkeypatch: pytest.MonkeyPatch, H: int) -> None:
    request, inputs, given = large(9000, H)
    got = chunk_backward.backward(request, inputs, (), given)
    monkeypatch.setattr(chunk_backward, "use_segments", lambda items, multiprocessors: False)
    want = chunk_backward.backward(request, inputs, (), given)
    for k, mine, other in zip(InputGrads._fields, got, want, strict=True):
        if mine is not None:
            assert error(mine, other.double().cpu()) < 2 * BOUND, k


def test_a_prefix_has_the_same_bits_whatever_follows() -> None:
    request, inputs, given = large(9000, 4)
    cut = 5000
    given.o[:, cut:] = 0
    whole = chunk_backward.backward(request, inputs, (), given)
    names = ("q", "k", "v", "g", "beta")
    short = inputs._replace(**{n: getattr(inputs, n)[:, :cut].contiguous() for n in names})
    alone = chunk_backward.backward(
        request_of("chunk_kda", short, **BOUNDED_MODEL), short, (), OutputGrads(given.o[:, :cut].contiguous())
    )
    for n in names:
        assert torch.equal(getattr(whole, n)[:, :cut], getattr(alone, n)), n
        assert not getattr(whole, n)[:, cut:].any(), n


def test_graph_replay_equals_eager() -> None:
    request, inputs, given = large(5000, 4)
    eager = chunk_backward.backward(request, inputs, (), given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chunk_backward.backward(request, inputs, (), given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chunk_backward.backward(request, inputs, (), given)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager)
