"""The fused chunk forward kernels on a GPU: what an emulator cannot show."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, error, oracle, request_of
from form_calls import grid_of

from kdacore.types import ChunkInputs, Outputs
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward

pytestmark = pytest.mark.gpu

GATES = pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
HEADS = pytest.mark.parametrize("H", [4, 80], ids=["few heads", "many heads"])


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where heads are few; those in segments have tests of their own."""
    monkeypatch.setattr(choice, "use_segments", lambda *given: False)


def draw(T: int, H: int, K: int = 128) -> ChunkInputs:
    d = Draw(T + H, device="cuda")
    tokens = {name: d.normal(1, T, H, K) for name in ("q", "k", "v")}
    gate = {name: x.cuda() for name, x in d.gate("init", 1, T, H, K).items()}
    state = d.normal(1, H, K, K, dtype=torch.float32)
    return ChunkInputs(**tokens, beta=d.normal(1, T, H), **gate, initial_state=state)


def run(inputs: ChunkInputs, **options: Any) -> Outputs:
    return chunk_forward.forward(request_of("chunk_kda", inputs, output_final_state=True, **options), inputs)


def capture(inputs: ChunkInputs, **options: Any) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """A graph of the call, and what its replays write."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, **options)
    return graph, captured


def same(a: Outputs, b: Outputs) -> bool:
    return torch.equal(a.o, b.o) and torch.equal(a.final_state, b.final_state)


@GATES
@pytest.mark.parametrize(("H", "K"), [(1, 128), (80, 128), (2, 64)])
def test_against_the_oracle(options: dict[str, Any], H: int, K: int) -> None:
    inputs = draw(700 if H < 80 else 70, H, K)
    got = run(inputs, **options)
    host = ChunkInputs(*(None if x is None else x.cpu() for x in inputs))
    want = oracle(request_of("chunk_kda", host, output_final_state=True, **options), host)
    assert error(got.o, want.o) < 2 * O_BOUND
    assert error(got.final_state, want.final_state) < 2 * STATE_BOUND


@GATES
@HEADS
def test_every_call_gives_the_same_bits(options: dict[str, Any], H: int) -> None:
    inputs = draw(300, H)
    first = run(inputs, **options)
    assert all(same(run(inputs, **options), first) for _ in range(200))


@GATES
@HEADS
def test_graph_replay_equals_eager(options: dict[str, Any], H: int) -> None:
    inputs = draw(300, H)
    eager = run(inputs, **options)
    graph, captured = capture(inputs, **options)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager)


@GATES
@pytest.mark.parametrize(("H", "blocks"), [(24, 30 * 4), (37, 132), (48, 132), (59, 132)])
def test_helpers_change_no_bits(
    monkeypatch: pytest.MonkeyPatch, H: int, blocks: int, options: dict[str, Any]
) -> None:
    """Eager, and three replays of a graph, whose flags have the same number every time."""
    inputs = draw(2100, H)
    monkeypatch.setattr(choice, "use_dataflow", lambda *given: False)
    with monkeypatch.context() as without:
        without.setattr(choice, "preparing_clusters", lambda *given: 0)
        want = run(inputs, **options)
    request = request_of("chunk_kda", inputs, output_final_state=True, **options)
    assert grid_of(request) == blocks  # with all clusters that run at once
    assert all(same(run(inputs, **options), want) for _ in range(20))
    graph, captured = capture(inputs, **options)
    for _ in range(3):
        captured.o.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, want)


@GATES
@pytest.mark.parametrize(("length", "row"), [(2100, 2), (1500, 1), (2100, -1)])
def test_helpers_of_a_pack_of_one_sequence(
    monkeypatch: pytest.MonkeyPatch, length: int, row: int, options: dict[str, Any]
) -> None:
    """24 heads as engines call them: padded behind the sequence, whose state is a row of a pool, or has none."""
    monkeypatch.setattr(choice, "use_dataflow", lambda *given: False)
    pool, found = torch.randn(4, 24, 128, 128, device="cuda"), []
    for used in (False, True):
        with monkeypatch.context() as patched:
            if not used:
                patched.setattr(choice, "preparing_clusters", lambda *given: 0)
            states = pool.clone()
            own = {
                "initial_state": states,
                "state_indices": torch.tensor([row], device="cuda"),
                "cu_seqlens": torch.tensor([0, length], device="cuda"),
            }
            inputs = draw(2100, 24)._replace(**own)
            request = request_of("chunk_kda", inputs, inplace_state=True, output_final_state=True, **options)
            assert grid_of(request) == (30 if used else 24) * 4
            o = chunk_forward.forward(request, inputs).o
            found.append((o[:, :length], states))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@GATES
def test_a_graph_with_helpers_is_replayed_with_other_lengths(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Of a pack of one sequence: flags lie elsewhere in the workspace, where an earlier replay has left chunks."""
    monkeypatch.setattr(choice, "use_dataflow", lambda *given: False)
    pool = torch.randn(4, 24, 128, 128, device="cuda")
    states, offsets = pool.clone(), torch.tensor([0, 2100], device="cuda")
    row = torch.tensor([2], device="cuda")
    inputs = draw(2100, 24)._replace(initial_state=states, state_indices=row, cu_seqlens=offsets)
    request = request_of("chunk_kda", inputs, inplace_state=True, output_final_state=True, **options)
    assert grid_of(request) == 30 * 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chunk_forward.forward(request, inputs).o
    for length, slot in ((2100, 2), (1500, 1), (2100, -1), (64, 0), (2100, 3)):
        offsets[1], row[0] = length, slot
        states.copy_(pool)
        eager = chunk_forward.forward(request, inputs).o[:, :length].clone(), states.clone()
        states.copy_(pool)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured[:, :length], eager[0]) and torch.equal(states, eager[1])


@GATES
@pytest.mark.parametrize("cluster", [2, 4])
def test_helpers_of_few_heads(monkeypatch: pytest.MonkeyPatch, cluster: int, options: dict[str, Any]) -> None:
    """Clusters with and without helpers, in a call small enough for compute-sanitizer."""
    inputs = draw(300, 3)
    monkeypatch.setattr(choice, "use_dataflow", lambda *given: False)
    monkeypatch.setattr(choice, "cluster_size", lambda *given: cluster)
    want = run(inputs, **options)
    monkeypatch.setattr(choice, "preparing_clusters", lambda items, *rest: -(-items // 4))
    assert same(run(inputs, **options), want)


def test_calls_on_two_streams() -> None:
    """Clusters that wait for one another, of calls that take each other's multiprocessors."""
    inputs = draw(2000, 80)
    first = run(inputs, **BOUNDED_MODEL)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(run(inputs, **BOUNDED_MODEL))
    torch.cuda.synchronize()
    assert all(same(x, first) for x in outputs)


def test_host_time() -> None:
    """25 microseconds a call are the bound; twice that allows for a busy machine."""
    inputs = draw(64, 2)
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    chunk_forward.forward(request, inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(300):
        chunk_forward.forward(request, inputs)
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    assert took / 300 < 50e-6


@GATES
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
def test_many_short_sequences(options: dict[str, Any], gate_dtype: torch.dtype) -> None:
    """A way of their own through the same kernel: the bits of a pack and of a longer call's start."""
    B, H = 300, 4
    d = Draw(1, device="cuda")
    tokens = {name: d.normal(B, 150, H, 128) for name in ("q", "k", "v")}
    gate = {name: x.cuda() for name, x in d.gate("init", B, 150, H, 128).items()}
    gate["g"] = gate["g"].to(gate_dtype)
    whole = ChunkInputs(**tokens, beta=d.normal(B, 150, H), **gate)
    want = run(whole, **options).o
    for T in (1, 15, 16, 17, 33, 64, 128):
        cut = {n: getattr(whole, n)[:, :T].contiguous() for n in ("q", "k", "v", "g", "beta")}
        batch = whole._replace(**cut)
        got = run(batch, **options)
        assert torch.equal(got.o, want[:, :T])
        packed = {n: x.flatten(0, 1)[None] for n, x in cut.items()}
        offsets = T * torch.arange(B + 1, device="cuda")
        other = run(batch._replace(**packed, cu_seqlens=offsets), **options)
        assert torch.equal(other.o.reshape(got.o.shape), got.o)
        assert torch.equal(other.final_state, got.final_state)
        assert all(same(run(batch, **options), got) for _ in range(20))
