"""Slices of a row on a GPU: against the oracle on the whole row and against the whole call, equal bits, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of
from slice_ranks import TOKENS, Row

from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.slices import backward as chunk_backward_slices
from kdacore_cuda.forms.slices import forward as chunk_forward_slices
from kdacore_cuda.forms.slices import launches as slices_launches
from kdacore_reference.oracle import oracle_backward, oracle_forward, to_float64

pytestmark = pytest.mark.gpu

BOUND = 8e-3
GATES = pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
PACK = [0, 1, 63, 64, 0, 700, 512, 300, 65, 0]


def on_gpu(inputs: ChunkInputs) -> ChunkInputs:
    return ChunkInputs(*(None if x is None else x.cuda() for x in inputs))


def state(*shape: int) -> torch.Tensor:
    return Draw(17).normal(*shape, 128, 128, dtype=torch.float32)


def packed() -> ChunkInputs:
    cu = torch.tensor(np.cumsum([0, *PACK]), dtype=torch.int32)
    return draw(1728, 1, 1, seed=2, cu_seqlens=cu, initial_state=state(len(PACK), 1))


CASES = {
    "dense": lambda: draw(1500, 2, 2, initial_state=state(1, 2)),
    "packed": packed,
    "grouped": lambda: draw(720, 1, 2, B=2, initial_state=state(2, 2)),
}


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices_launches, "slice_segment_chunks", lambda *args: 2)


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


@GATES
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "kept"), [*((name, False) for name in CASES), ("dense", True), ("grouped", True)]
)
def test_the_whole_against_the_oracle(
    short_segments: None, name: str, kept: bool, ranks: int, options: dict[str, Any]
) -> None:
    """Memory that a call gets is NaN, and every call gives the same bits."""
    inputs = CASES[name]()
    request = request_of("chunk_kda", inputs, output_final_state=True, **options)
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


@pytest.mark.parametrize("H", [4, 32])
@pytest.mark.parametrize(
    "lengths", [(), (5000, 11000, 384), (140,) * 109], ids=["dense", "packed", "many sequences"]
)
def test_a_long_row_as_the_whole_call(H: int, lengths: tuple[int, ...]) -> None:
    """In segments as they are chosen; two computations of 16-bit inputs, each within its bounds."""
    d = Draw(7, device="cuda")
    fields = {n: d.normal(1, 16384, H, 128) for n in ("q", "k", "v")}
    cu = torch.tensor(np.cumsum([0, *lengths]), device="cuda") if lengths else None
    inputs = ChunkInputs(
        **fields, beta=d.normal(1, 16384, H), **d.gate("init", 1, 16384, H, 128), cu_seqlens=cu
    )
    inputs = ChunkInputs(*(None if x is None else x.cuda() for x in inputs))
    request = request_of("chunk_kda", inputs, output_final_state=True, **BOUNDED_MODEL)
    grads = given_for(inputs, request.state_shape)
    whole = chunk_forward.forward(request, inputs)
    whole_grads = chunk_backward.backward(request, inputs, (), grads)
    got = results(inputs, 4, grads, True, **BOUNDED_MODEL)
    assert error(got[0], to_float64(whole.o)) < 2 * O_BOUND
    assert error(got[1], to_float64(whole.final_state)) < 2 * STATE_BOUND
    for field, mine in zip(InputGrads._fields, got[2:], strict=False):
        want = getattr(whole_grads, field)
        if want is not None:
            assert error(mine, to_float64(want)) < 2 * BOUND, field


def test_in_a_graph(short_segments: None) -> None:
    """Nothing waits for the host."""
    inputs = on_gpu(packed())
    row = Row(inputs, 2, output_final_state=True, **BOUNDED_MODEL)
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
