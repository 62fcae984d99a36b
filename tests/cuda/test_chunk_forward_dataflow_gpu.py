"""``chunk_kda`` in two launches side by side on a GPU: against the oracle and the fused kernel, equal bits, graphs,
several streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import (
    BOUNDED_MODEL,
    MODEL,
    O_BOUND,
    STATE_BOUND,
    Draw,
    error,
    request_of,
)
from form_calls import dataflow_forward
from forward_checks import TOKENS, check_against_the_oracle

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import choice
from kdacore_cuda.choice import use_dataflow
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.runtime import torch_launch

pytestmark = pytest.mark.gpu
GATES = pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])


def draw(T: int, H: int, HV: int | None = None, *, B: int = 1, gate: str = "init") -> ChunkInputs:
    d, HV = Draw(T + H, device="cuda"), HV or H
    return ChunkInputs(
        q=d.normal(B, T, H, 128),
        k=d.normal(B, T, H, 128),
        v=d.normal(B, T, HV, 128),
        beta=d.normal(B, T, HV),
        **{name: x.cuda() for name, x in d.gate(gate, B, T, HV, 128).items()},
        initial_state=d.normal(B, HV, 128, 128, dtype=torch.float32),
    )


CASES = {
    "one head": lambda: draw(2200, 1),
    "batch": lambda: draw(333, 2, B=3),
    "grouped": lambda: draw(1100, 2, 4),
    "short": lambda: draw(65, 5, 20),
}


def request(inputs: ChunkInputs, **options: Any) -> Request:
    return request_of("chunk_kda", inputs, output_final_state=True, **options)


def same(a: Outputs, b: Outputs) -> bool:
    assert a.final_state is not None
    assert b.final_state is not None
    return bool(torch.equal(a.o, b.o) and torch.equal(a.final_state, b.final_state))


@GATES
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, options: dict[str, Any]) -> None:
    check_against_the_oracle(dataflow_forward, request, CASES[name](), options)


@GATES
def test_large_calls_agree_with_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    inputs = draw(16384, 24)
    got = dataflow_forward(r := request(inputs, **options), inputs)
    monkeypatch.setattr(choice, "use_dataflow", lambda *args: False)
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    want = chunk_forward.forward(r, inputs)
    assert error(got.o, want.o.double().cpu()) < 3 * O_BOUND
    assert want.final_state is not None
    assert error(got.final_state, want.final_state.double().cpu()) < 3 * STATE_BOUND


@GATES
@pytest.mark.parametrize("H", [2, 24])
def test_every_call_gives_the_same_bits(H: int, options: dict[str, Any]) -> None:
    inputs = draw(4200, H)
    r = request(inputs, **options)
    first = dataflow_forward(r, inputs)
    assert all(same(dataflow_forward(r, inputs), first) for _ in range(50))


def test_appended_tokens_change_no_bit() -> None:
    """Through the backend's own choice."""
    inputs = draw(3000, 20)
    assert use_dataflow(20, False, torch_launch.multiprocessors(0))
    whole = chunk_forward.forward(request(inputs, **MODEL), inputs)
    assert same(whole, dataflow_forward(request(inputs, **MODEL), inputs))
    for T in (1, 64, 1025, 2000):
        cut = inputs._replace(**{n: getattr(inputs, n)[:, :T].contiguous() for n in TOKENS})
        assert torch.equal(chunk_forward.forward(request(cut, **MODEL), cut).o, whole.o[:, :T])


@GATES
def test_replays_equal_eager(options: dict[str, Any]) -> None:
    """The number of a captured call does not change: no flag may be left from the replay before."""
    inputs = draw(3000, 20)
    r = request(inputs, **options)
    eager = dataflow_forward(r, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dataflow_forward(r, inputs)
    for _ in range(20):
        captured.o.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, eager)


def test_several_streams() -> None:
    """More blocks than multiprocessors, of calls that do not wait for one another."""
    inputs = draw(2000, 24)
    r = request(inputs, **BOUNDED_MODEL)
    want = dataflow_forward(r, inputs)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(6)], []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(dataflow_forward(r, inputs))
    torch.cuda.synchronize()
    assert all(same(x, want) for x in found)
