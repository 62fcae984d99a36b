"""Slices of a row on a GPU: against the oracle on the whole row and against the whole call, equal bits, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_backward_calls import draw as draw_kda
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of
from gated_delta_calls import draw as draw_gated_delta
from slice_checks import offsets, state, use_segments
from slice_ranks import TOKENS, Row

from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import gradients as gated_delta_backward
from kdacore_cuda.forms.slices import backward as chunk_backward_slices
from kdacore_cuda.forms.slices import forward as chunk_forward_slices
from kdacore_reference.oracle import oracle_backward, oracle_forward, to_float64

pytestmark = pytest.mark.gpu

BOUND = 8e-3
KDA, GATED_DELTA = "chunk_kda", "chunk_gated_delta_rule"
CALLS = pytest.mark.parametrize(
    ("op", "options"),
    [(KDA, BOUNDED_MODEL), (KDA, MODEL), (GATED_DELTA, MODEL)],
    ids=["bounded", "unbounded", "gated delta"],
)
PACK = [0, 1, 63, 64, 0, 700, 512, 300, 65, 0]


def on_gpu(inputs: ChunkInputs) -> ChunkInputs:
    return ChunkInputs(*(None if x is None else x.cuda() for x in inputs))


def draw(op: str, *sizes: int, **more: Any) -> ChunkInputs:
    return (draw_kda if op == KDA else draw_gated_delta)(*sizes, **more)


def packed(op: str) -> ChunkInputs:
    cu = offsets(PACK, torch.int32)
    return draw(op, 1728, 1, 1, seed=2, cu_seqlens=cu, initial_state=state(len(PACK), 1))


CASES = {
    "dense": lambda op: draw(op, 1500, 2, 2, initial_state=state(1, 2)),
    "packed": packed,
    "grouped": lambda op: draw(op, 720, 1, 2, B=2, initial_state=state(2, 2)),
}


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    use_segments(monkeypatch, 2)


def given_for(inputs: ChunkInputs, final_shape: tuple[int, ...]) -> OutputGrads:
    d = Draw(5, device=str(inputs.v.device))
    do = d.normal(*inputs.v.shape)
    if inputs.cu_seqlens is not None:
        do[:, int(inputs.cu_seqlens[-1]) :] = 0  # padding
    return OutputGrads(do, d.normal(*final_shape, dtype=torch.float32))


def results(
    inputs: ChunkInputs, ranks: int, grads: OutputGrads, kept: bool = False, **options: Any
) -> list[torch.Tensor]:
    row = Row(inputs, ranks, kept, output_final_state=True, **options)
    return [x for x in (*row.outputs(), *row.gradients(grads)) if x is not None]


@CALLS
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "kept"), [*((name, False) for name in CASES), ("dense", True), ("grouped", True)]
)
def test_the_whole_against_the_oracle(
    short_segments: None, name: str, kept: bool, ranks: int, op: str, options: dict[str, Any]
) -> None:
    """Memory that a call gets is NaN, and every call gives the same bits."""
    inputs = CASES[name](op)
    request = request_of(op, inputs, output_final_state=True, **options)
    grads = given_for(inputs, request.state_shape)
    exact, exact_grads = oracle_forward(request, inputs), oracle_backward(request, inputs, grads)
    there, moved = on_gpu(inputs), OutputGrads(*(x.cuda() for x in grads))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        got = results(there, ranks, moved, kept, **options)
        for _ in range(5):
            again = results(there, ranks, moved, kept, **options)
            assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert error(got[0], exact.o) < 2 * O_BOUND
    assert error(got[1], exact.final_state) < 2 * STATE_BOUND
    for field, mine in zip(InputGrads._fields, got[2:], strict=True):
        assert error(mine, getattr(exact_grads, field)) < 2 * BOUND, field


@CALLS
@pytest.mark.parametrize("H", [4, 32])
@pytest.mark.parametrize(
    "lengths", [(), (5000, 11000, 384), (140,) * 109], ids=["dense", "packed", "many sequences"]
)
def test_a_long_row_as_the_whole_call(
    H: int, lengths: tuple[int, ...], op: str, options: dict[str, Any]
) -> None:
    """In segments as they are chosen; two computations of 16-bit inputs, each within its bounds."""
    cu = offsets(list(lengths), torch.int64) if lengths else None
    inputs = on_gpu(draw(op, 16384, H, H, seed=7, gate="init", cu_seqlens=cu))
    request = request_of(op, inputs, output_final_state=True, **options)
    grads = given_for(inputs, request.state_shape)
    forward, backward = (chunk_forward, chunk_backward) if op == KDA else (gated_delta, gated_delta_backward)
    whole = forward.forward(request, inputs)
    whole_grads = backward.backward(request, inputs, (), grads)
    got = results(inputs, 4, grads, True, **options)
    assert error(got[0], to_float64(whole.o)) < 2 * O_BOUND
    assert error(got[1], to_float64(whole.final_state)) < 2 * STATE_BOUND
    for field, mine in zip(InputGrads._fields, got[2:], strict=False):
        want = getattr(whole_grads, field)
        if want is not None:
            assert error(mine, to_float64(want)) < 2 * BOUND, field


@CALLS
def test_in_a_graph(short_segments: None, op: str, options: dict[str, Any]) -> None:
    """Nothing waits for the host."""
    inputs = on_gpu(packed(op))
    row = Row(inputs, 2, output_final_state=True, **options)
    rank = row.ranks[0]

    def call() -> tuple[torch.Tensor, ...]:
        begun = chunk_forward_slices.begin(rank.request, rank.inputs, None)
        outputs = chunk_forward_slices.finish(rank.request, rank.inputs, begun.pending, row.initial)
        grads = OutputGrads(rank.inputs.v, row.initial)
        known, pending = chunk_backward_slices.backward_begin(
            rank.request, rank.inputs, (), grads, row.initial, None
        )
        found = chunk_backward_slices.backward_finish(
            rank.request, rank.inputs, (), pending, grads, row.initial, row.initial
        )
        return (begun.M, begun.C, outputs.o, known, *(getattr(found, n) for n in TOKENS))

    want = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for x in got:
        x.zero_()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
