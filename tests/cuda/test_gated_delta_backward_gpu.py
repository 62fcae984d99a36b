"""Gradients of ``chunk_gated_delta_rule`` on a GPU: against the oracle, equal bits, graphs, several streams."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from chunk_backward_calls import same_gradients
from cuda_calls import MODEL, Draw, error, request_of
from gated_delta_backward_calls import BOUND, carry, leave_uncut
from test_gated_delta_gpu import OP, draw

import kdacore
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import gradients
from kdacore_reference.oracle import oracle_backward

pytestmark = pytest.mark.gpu
PACK = [0, 1, 31, 64, 65, 0, 300, 700]


def packed() -> ChunkInputs:
    """With rows behind the pack."""
    offsets = torch.tensor(np.cumsum([0, *PACK]), dtype=torch.int32, device="cuda")
    states = Draw(2, device="cuda").normal(len(PACK), 6, 128, 128, dtype=torch.float32)
    return draw(sum(PACK) + 40, 2, 6, cu_seqlens=offsets, initial_state=states)


CASES = {
    "one head": lambda: draw(2200, 1, 1),
    "segments": lambda: draw(9000, 2, 4),
    "batch": lambda: draw(333, 2, 4, B=3),
    "many heads": lambda: draw(500, 4, 80),
    "large decays": lambda: draw(1100, 2, 4, gate="random"),
    "pack": packed,
}


def call(inputs: ChunkInputs, **options: Any) -> tuple[Request, OutputGrads]:
    """With gradients of both results."""
    r = request_of(OP, inputs, output_final_state=True, **MODEL, **options)
    d = Draw(5, device="cuda")
    d_o, d_ht = d.normal(*inputs.v.shape), d.normal(*r.state_shape, dtype=torch.float32)
    return dataclasses.replace(r, needs_grad=True), OutputGrads(d_o, d_ht)


def run(inputs: ChunkInputs, **options: Any) -> InputGrads:
    r, grads = call(inputs, **options)
    return gradients.backward(r, inputs, (), grads)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("saves", [False, True])
def test_against_the_oracle(name: str, saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public function; where few heads save, they are not cut."""
    if saves:
        leave_uncut(monkeypatch)
    inputs = CASES[name]()
    r, grads = call(inputs)
    leaves = {
        n: x.requires_grad_(x.is_floating_point()) for n, x in inputs._asdict().items() if x is not None
    }
    options: dict[str, Any] = {"output_final_state": True, "disable_recompute": saves, "backend": "cuda"}
    with kdacore.record_selections() as ran:
        results = kdacore.chunk_gated_delta_rule(**leaves, **MODEL, **options)
    (form,) = [s.candidate("cuda").form for s in ran]
    assert form.startswith("gated_delta: disable_recompute" if saves else "gated_delta: ")
    torch.autograd.backward(results, [grads.o, grads.final_state])
    host = ChunkInputs(*(None if x is None else x.detach().cpu() for x in inputs))
    given = OutputGrads(grads.o.cpu(), grads.final_state.cpu())
    r = dataclasses.replace(request_of(OP, host, output_final_state=True, **MODEL), needs_grad=True)
    want = oracle_backward(r, host, given)
    for n, x in leaves.items():
        if x.is_floating_point():
            assert error(x.grad, getattr(want, n)) < 2 * BOUND, n


@pytest.mark.parametrize("HV", [4, 64])
def test_every_call_gives_the_same_bits(HV: int) -> None:
    """Two calls in turns, which share their workspace: what a kernel reads too early is the other's."""
    calls = [draw(T, HV // 2, HV) for T in (4200, 4199)]
    first = [run(x) for x in calls]
    for _ in range(25):
        for got, want in zip([run(x) for x in calls], first, strict=True):
            same_gradients(got, want)


def test_both_kinds_of_blocks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncut(monkeypatch)
    inputs, found = draw(3000, 8, 16), []
    for warpgroups in (1, 2):
        carry(monkeypatch, warpgroups)
        found.append(run(inputs))  # each request is planned by itself
    same_gradients(*found)


@pytest.mark.parametrize("HV", [4, 80])
def test_what_a_forward_saves_gives_the_same_bits(HV: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncut(monkeypatch)
    inputs = draw(2100, 2, HV)
    r, grads = call(inputs, disable_recompute=True)
    out = gated_delta.forward(r, inputs)
    assert len(out.saved) == 1
    same_gradients(gradients.backward(r, inputs, out.saved, grads), run(inputs))


def test_a_sequence_has_the_same_bits_alone_and_in_a_pack() -> None:
    inputs = packed()
    r, grads = call(inputs)
    got = gradients.backward(r, inputs, (), grads)
    end = sum(PACK)
    tokens = {n: getattr(inputs, n)[:, end - 700 : end].contiguous() for n in ("q", "k", "v", "g", "beta")}
    assert inputs.initial_state is not None
    alone = inputs._replace(**tokens, cu_seqlens=None, initial_state=inputs.initial_state[-1:])
    r, _ = call(alone)
    own = OutputGrads(grads.o[:, end - 700 : end].contiguous(), grads.final_state[-1:])
    want = gradients.backward(r, alone, (), own)
    for n in tokens:
        assert torch.equal(getattr(got, n)[:, end - 700 : end], getattr(want, n)), n
        assert not getattr(got, n)[:, end:].any(), n
    assert torch.equal(got.initial_state[-1:], want.initial_state)


@pytest.mark.parametrize("saves", [False, True])
def test_replays_equal_eager(saves: bool) -> None:
    inputs = draw(3000, 12, 24)
    r, grads = call(inputs, disable_recompute=saves)

    def step() -> InputGrads:
        out = gated_delta.forward(r, inputs)
        return gradients.backward(r, inputs, out.saved, grads)

    eager = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(20):
        for x in captured:
            if x is not None:
                x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        same_gradients(captured, eager)


def test_several_streams() -> None:
    inputs = draw(2000, 12, 24)
    want = run(inputs)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(6)], []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(inputs))
    torch.cuda.synchronize()
    for got in found:
        same_gradients(got, want)
