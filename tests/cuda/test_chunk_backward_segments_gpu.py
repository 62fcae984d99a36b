"""The backward in segments on a GPU, also with what the forward kept: against the oracle and the one chain per head,
equal bits, graphs, causality."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, error, request_of
from single_launches import in_segments

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths
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
    monkeypatch.setattr(chunk_backward_segments, "backward_segment_chunks", lambda *given: 2)
    monkeypatch.setattr(segment_lengths, "lengths_of", lambda *given: SegmentLengths.growing(1, 3, 2, 2, 3))


def same(a: InputGrads, b: InputGrads) -> bool:
    return all(x is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved_of(request: Request, inputs: ChunkInputs, kept: bool) -> tuple[Request, tuple[Any, ...]]:
    """A call and what its backward is given: nothing, or what the forward kept."""
    if not kept:
        return request, ()
    request = dataclasses.replace(request, needs_grad=True)
    saved = chunk_forward.forward(request, inputs).saved
    assert len(saved) == 1
    return request, saved


KEPT = pytest.mark.parametrize("kept", [False, True], ids=["computed again", "kept"])


@GATES
@KEPT
@pytest.mark.parametrize("name", CASES)
def test_the_whole_against_the_oracle(
    short_segments: None, name: str, options: dict[str, Any], kept: bool
) -> None:
    """Memory that a call gets is NaN, and every call gives the same bits."""
    inputs = CASES[name]()
    request = request_of("chunk_kda", inputs, output_final_state=True, **options)
    d = Draw(5)
    given = OutputGrads(d.normal(*inputs.v.shape), d.normal(*request.state_shape, dtype=torch.float32))
    want = oracle_backward(request, inputs, given)
    there = on_gpu(inputs)
    request = request_of("chunk_kda", there, output_final_state=True, **options)
    moved = OutputGrads(*(None if x is None else x.cuda() for x in given))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        request, saved = saved_of(request, there, kept)
        assert in_segments(request, bool(saved)).launches[0][0] == "maps"
        got = chunk_backward.backward(request, there, saved, moved)
        for _ in range(20):
            request, saved = saved_of(request, there, kept)
            assert same(chunk_backward.backward(request, there, saved, moved), got)
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
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    # Partly aligned with o, as in the conformance suite: else the gradient of A_log, a sum over all tokens, cancels,
    # and two approximations of it may lie a twentieth apart.
    o = chunk_forward.forward(request, inputs).o.float()
    do = o / o.square().mean().sqrt() + 0.5 * d.normal(1, T, H, 128, dtype=torch.float32)
    return request, inputs, OutputGrads(do.bfloat16())


@pytest.mark.parametrize(
    ("H", "kept"), [(1, False), (4, False), (8, False), (1, True), (4, True), (8, True), (16, True)]
)
def test_large_calls_agree_with_one_chain_per_head(
    monkeypatch: pytest.MonkeyPatch, H: int, kept: bool
) -> None:
    request, inputs, given = large(9000, H)
    request, saved = saved_of(request, inputs, kept)
    got = chunk_backward.backward(request, inputs, saved, given)
    for _ in range(10):  # other memory, and the same bits
        request, saved = saved_of(request, inputs, kept)
        assert same(chunk_backward.backward(request, inputs, saved, given), got)
    monkeypatch.setattr(choice, "use_segments_backward", lambda items, multiprocessors: False)
    want = chunk_backward.backward(request, inputs, (), given)
    for k, mine, other in zip(InputGrads._fields, got, want, strict=True):
        if mine is not None:
            assert error(mine, other.double().cpu()) < 2 * BOUND, k


@KEPT
@pytest.mark.parametrize("cut", [600, 5000])
def test_a_prefix_has_the_same_bits_whatever_follows(cut: int, kept: bool) -> None:
    """600 tokens are one segment, of which nothing is kept."""
    request, inputs, given = large(9000, 4)
    given.o[:, cut:] = 0
    request, saved = saved_of(request, inputs, kept)
    whole = chunk_backward.backward(request, inputs, saved, given)
    names = ("q", "k", "v", "g", "beta")
    short = inputs._replace(**{n: getattr(inputs, n)[:, :cut].contiguous() for n in names})
    request = request_of("chunk_kda", short, **BOUNDED_MODEL)
    if cut > 640:
        request, saved = saved_of(request, short, kept)
    else:
        saved = ()
    alone = chunk_backward.backward(request, short, saved, OutputGrads(given.o[:, :cut].contiguous()))
    for n in names:
        assert torch.equal(getattr(whole, n)[:, :cut], getattr(alone, n)), n
        assert not getattr(whole, n)[:, cut:].any(), n


@KEPT
def test_graph_replay_equals_eager(kept: bool) -> None:
    """Of the forward, too, where it keeps something."""
    request, inputs, given = large(5000, 4)
    request, _ = saved_of(request, inputs, kept)

    def step() -> InputGrads:
        saved = chunk_forward.forward(request, inputs).saved if kept else ()
        return chunk_backward.backward(request, inputs, saved, given)

    eager = step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager)
