"""``chunk_kda`` in segments on a GPU: against the oracle and the fused kernel, equal bits, graphs."""

from __future__ import annotations

import time
from typing import Any

import chunk_backward_model as chunk_model
import chunk_forward_segments_model as model
import numpy as np
import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of
from form_calls import FormCall, segments_forward
from forward_checks import check_against_the_oracle

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.segments import kernels as segments_kernels
from kdacore_cuda.runtime import torch_launch

pytestmark = pytest.mark.gpu

GATES = pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
PACK = [0, 1, 63, 64, 0, 1500, 1024, 300, 65]


def draw(
    T: int, H: int, HV: int | None = None, *, gate: str = "init", N: int = 1, **more: Any
) -> ChunkInputs:
    d, HV = Draw(T + H, device="cuda"), HV or H
    return ChunkInputs(
        q=d.normal(1, T, H, 128),
        k=d.normal(1, T, H, 128),
        v=d.normal(1, T, HV, 128),
        beta=d.normal(1, T, HV),
        **{name: x.cuda() for name, x in d.gate(gate, 1, T, HV, 128).items()},
        initial_state=d.normal(N, HV, 128, 128, dtype=torch.float32),
        **more,
    )


def packed() -> ChunkInputs:
    cu = torch.tensor(np.cumsum([0, *PACK]), dtype=torch.int32, device="cuda")
    return draw(sum(PACK), 1, 2, N=len(PACK), cu_seqlens=cu)


CASES = {"dense": lambda: draw(2200, 2), "packed": packed, "grouped": lambda: draw(1100, 2, 4)}


def request(inputs: ChunkInputs, **options: Any) -> Request:
    return request_of("chunk_kda", inputs, output_final_state=True, **options)


def same(a: Outputs, b: Outputs) -> bool:
    return torch.equal(a.o, b.o) and torch.equal(a.final_state, b.final_state)


@GATES
@pytest.mark.parametrize("name", CASES)
def test_each_launch_on_what_the_one_before_left(name: str, options: dict[str, Any]) -> None:
    """In this order, so that the first that fails is the one that is wrong."""
    inputs = CASES[name]()
    call = FormCall("segments", r := request(inputs, **options), inputs)
    host = ChunkInputs(*(None if x is None else x.cpu() for x in inputs))
    on_host = request(host, **options)
    view = model.views(r, call.workspace)

    def launch(step: str) -> None:
        call.launch(step)
        torch.cuda.synchronize()

    call.workspace.fill_(255)  # NaN
    launch("prepare")
    work = model.get_operands(view.operands)
    exact = model.prepare(on_host, host)
    where = tuple(
        np.transpose([(c.slot, h) for c in model.chunk_model.chunks(on_host, host) for h in range(r.HV)])
    )
    for part, x in work.items():
        assert error(x[where], exact[part][where]) < 1e-2, part
    work["v"] = exact["v"]

    launch("maps")
    B, A = model.maps(on_host, host, work)
    for got, want in zip(model.get_maps(view), (B, A), strict=True):
        made = ~np.isnan(want)
        assert error(got[made], want[made]) < 1e-2
    launch("chain")
    starts = model.chain(on_host, host, *model.get_maps(view))
    made = ~np.isnan(starts)
    got = chunk_model.from_tiles(model.to_float64(view.starts))
    assert error(got[made], starts[made]) < 1e-4
    launch("output")
    o, final, _ = model.output(on_host, host, work, got)
    assert error(call.outputs.o, o) < 1e-2
    assert error(call.outputs.final_state, np.swapaxes(final, -1, -2)) < 1e-2


@GATES
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str, options: dict[str, Any]) -> None:
    check_against_the_oracle(segments_forward, request, CASES[name](), options)


@GATES
def test_large_calls_agree_with_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """More blocks than run at once."""
    inputs = draw(16384, 16)
    got = segments_forward(r := request(inputs, **options), inputs)
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)
    want = chunk_forward.forward(r, inputs)
    assert error(got.o, want.o.double().cpu()) < 3 * O_BOUND
    assert error(got.final_state, want.final_state.double().cpu()) < 3 * STATE_BOUND


@GATES
@pytest.mark.parametrize("H", [2, 16])
def test_every_call_gives_the_same_bits(H: int, options: dict[str, Any]) -> None:
    inputs = draw(4200, H)
    r = request(inputs, **options)
    first = segments_forward(r, inputs)
    assert all(same(segments_forward(r, inputs), first) for _ in range(50))


@GATES
@pytest.mark.parametrize(("T", "H"), [(8192, 8), (8192, 12), (8192, 16), (5000, 6), (2050, 4)])
def test_composed_start_states_have_the_bits_of_the_chain(
    monkeypatch: pytest.MonkeyPatch, T: int, H: int, options: dict[str, Any]
) -> None:
    """Products of a warpgroup and of a warp add up in the same order; which ones are used depends on the tokens."""
    inputs = draw(T, H)._replace(initial_state=None)
    composed = FormCall("segments", request(inputs, **options), inputs)
    assert "chain" not in composed.names
    got = segments_forward(request(inputs, **options), inputs)
    monkeypatch.setattr(segments_kernels, "output_composes", lambda segments, blocks: False)
    chained = FormCall("segments", request(inputs, **options), inputs)
    assert "chain" in chained.names
    assert same(got, segments_forward(request(inputs, **options), inputs))


def test_appended_tokens_change_no_bit() -> None:
    """Through the backend's own choice, from one chunk to many segments."""
    inputs = draw(5000, 8)
    whole = chunk_forward.forward(request(inputs, **BOUNDED_MODEL), inputs).o
    for T in (1, 64, 1024, 1025, 3000):
        cut = inputs._replace(
            **{n: getattr(inputs, n)[:, :T].contiguous() for n in ("q", "k", "v", "g", "beta")}
        )
        assert torch.equal(chunk_forward.forward(request(cut, **BOUNDED_MODEL), cut).o, whole[:, :T])


@GATES
def test_graph_replay_equals_eager(options: dict[str, Any]) -> None:
    inputs = draw(3000, 4)
    r = request(inputs, **options)
    eager = segments_forward(r, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = segments_forward(r, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager)


@pytest.mark.parametrize(("T", "bound"), [(64, 50e-6), (2000, 80e-6)])
def test_host_time(T: int, bound: float) -> None:
    """Two launches and four; 25 microseconds and 40 are meant, twice that allows for a busy machine. The best of five
    rounds: the first calls of a process take longer."""
    inputs = draw(T, 2)
    r = request(inputs, **BOUNDED_MODEL)
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            chunk_forward.forward(r, inputs)
        rounds.append((time.perf_counter() - start) / 100)
    assert min(rounds) < bound


def test_few_heads_go_in_segments() -> None:
    assert choice.use_segments(
        16, True, choice.Figures("sm_90a", torch_launch.multiprocessors(0), lambda cluster: 0, lambda: 0.0)
    )
    inputs = draw(64, 16)
    got = chunk_forward.forward(r := request(inputs, **BOUNDED_MODEL), inputs)
    assert same(got, segments_forward(r, inputs))
