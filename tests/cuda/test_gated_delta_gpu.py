"""``chunk_gated_delta_rule`` on a GPU: against the oracle, equal bits, graphs, several streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import MODEL, O_BOUND, STATE_BOUND, Draw, error, oracle, request_of

import kdacore
from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import launches, segments

pytestmark = pytest.mark.gpu
OP = "chunk_gated_delta_rule"


@pytest.fixture(params=[False, True], ids=["one after the other", "side by side"])
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether records are made while others are walked, whatever would be chosen."""
    monkeypatch.setattr(choice, "most_cut", lambda count: 0)
    monkeypatch.setattr(choice, "use_records_beside", lambda *given: request.param)
    return bool(request.param)


def draw(T: int, H: int, HV: int, *, B: int = 1, gate: str = "init", **arrays: Any) -> ChunkInputs:
    d = Draw(T + HV, device="cuda")
    gates = {n: (x if n == "A_log" else x[..., 0]).cuda() for n, x in d.gate(gate, B, T, HV, 1).items()}
    q, k, v = d.normal(B, T, H, 128), d.normal(B, T, H, 128), d.normal(B, T, HV, 128)
    state = d.normal(B, HV, 128, 128, dtype=torch.float32)
    inputs = ChunkInputs(q, k, v, beta=d.normal(B, T, HV), initial_state=state, **gates)
    return inputs._replace(**arrays)


def run(inputs: ChunkInputs, **options: Any) -> Outputs:
    return gated_delta.forward(request_of(OP, inputs, output_final_state=True, **MODEL, **options), inputs)


def same(a: Outputs, b: Outputs) -> bool:
    assert a.final_state is not None and b.final_state is not None
    return bool(torch.equal(a.o, b.o) and torch.equal(a.final_state, b.final_state))


CASES = {
    "one head": lambda: draw(2200, 1, 1),
    "segments": lambda: draw(9000, 2, 4),
    "batch": lambda: draw(333, 2, 4, B=3),
    "many heads": lambda: draw(500, 4, 80),
    "large decays": lambda: draw(1100, 2, 4, gate="random"),
}


@pytest.mark.parametrize(("T", "H", "HV"), [(2048, 4, 8), (5003, 1, 2), (8192, 2, 8)])
@pytest.mark.parametrize("shorter", [False, True])
def test_composed_starts_have_the_bits_of_the_chain(
    monkeypatch: pytest.MonkeyPatch, T: int, H: int, HV: int, shorter: bool
) -> None:
    """Products of a warpgroup and of a warp add up in the same order; which ones are used depends on the tokens."""
    monkeypatch.setattr(choice, "USE_COMPOSED_STARTS", True)
    monkeypatch.setattr(choice, "USE_SHORTER_SEGMENTS", shorter)
    inputs, found = draw(T, H, HV), []
    for most in (99, 0):
        monkeypatch.setattr(choice, "_MOST_COMPOSED", most)
        request = request_of(OP, inputs, output_final_state=True, **MODEL)
        cut = segments.cut_of(request)
        assert cut is not None and bool(cut.chain) == (most == 0)
        found.append(gated_delta.forward(request, inputs))
    assert same(*found)


@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name: str) -> None:
    """Through the public function, with a checkpoint every 192 tokens."""
    inputs = CASES[name]()
    arrays = {n: x for n, x in inputs._asdict().items() if x is not None}
    options: dict[str, Any] = MODEL | {"checkpoint_every": 192, "output_final_state": True}
    with kdacore.record_selections() as ran:
        o, state, checkpoints = kdacore.chunk_gated_delta_rule(**arrays, **options, backend="cuda")
    assert [(s.backend, s.candidate("cuda").form.split(":")[0]) for s in ran] == [("cuda", "gated_delta")]
    host = ChunkInputs(*(None if x is None else x.cpu() for x in inputs))
    want = oracle(request_of(OP, host, **options), host)
    assert error(o, want.o) < O_BOUND
    assert error(state, want.final_state) < STATE_BOUND
    assert error(checkpoints, want.checkpoints) < STATE_BOUND


@pytest.mark.parametrize("HV", [4, 64])
def test_every_call_gives_the_same_bits(beside: bool, HV: int) -> None:
    """Side by side also with more blocks than multiprocessors: walks then begin late."""
    inputs = draw(4200, HV // 2, HV)
    first = run(inputs)
    assert all(same(run(inputs), first) for _ in range(50))


def test_both_kinds_of_blocks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, found = draw(3000, 16, 32), []
    for warpgroups in (1, 2):
        monkeypatch.setattr(launches, "walk_warpgroups", lambda *given, count=warpgroups: count)
        found.append(run(inputs))  # each request is planned by itself
    assert same(*found)


def lengths(*given: int) -> torch.Tensor:
    return torch.tensor([0, *given], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


BESIDE = {
    "long": lambda: draw(8192, 16, 32),
    "batch": lambda: draw(2100, 4, 8, B=4),
    "one head": lambda: draw(20_000, 1, 1),
    "a head for each": lambda: draw(3000, 36, 36),
    "large group": lambda: draw(5000, 2, 14),
    "pack": lambda: draw(4700, 2, 4, cu_seqlens=lengths(3000, 100, 0, 64, 1500, 1), initial_state=None),
    "pack, many": lambda: draw(4700, 1, 1, cu_seqlens=lengths(*[146] * 32), initial_state=None),
}


@pytest.mark.parametrize("name", BESIDE)
def test_records_beside_walks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As launches one after the other."""
    inputs, found = BESIDE[name](), []
    for used in (False, True):
        monkeypatch.setattr(choice, "most_cut", lambda count: 0)
        monkeypatch.setattr(choice, "use_records_beside", lambda *given, used=used: used)
        found.append([run(inputs, checkpoint_every=256) for _ in range(5)])
    (want, *_), others = found
    for got in others:
        assert same(got, want)
        assert got.checkpoints is not None and torch.equal(got.checkpoints, want.checkpoints)


def test_replays_equal_eager(beside: bool) -> None:
    """The number of a captured call does not change: no flag may be left from the replay before."""
    inputs = draw(3000, 10, 20)
    eager = run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs)
    for _ in range(20):
        captured.o.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, eager)


def test_several_streams(beside: bool) -> None:
    """More blocks than multiprocessors, of calls that do not wait for one another."""
    inputs = draw(2000, 12, 24)
    want = run(inputs)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(6)], []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(inputs))
    torch.cuda.synchronize()
    assert all(same(x, want) for x in found)
