"""The recurrent kernel on a GPU: what an emulator cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, O_BOUND, STATE_BOUND, Draw, error, oracle, request_of

import kdacore
from kdacore.types import RecurrentInputs
from kdacore_cuda.forms.recurrent import forward as recurrent

pytestmark = pytest.mark.gpu


def draw(B: int, T: int, H: int, K: int, pool: torch.Tensor, rows: list[int]) -> RecurrentInputs:
    d = Draw(B + T, device="cuda")
    tokens = {name: d.normal(B, T, H, K) for name in ("q", "k", "v")}
    indices = torch.tensor(rows, dtype=torch.int32, device="cuda")
    gate = {name: x.cuda() for name, x in d.gate("random", B, T, H, K).items()}
    return RecurrentInputs(
        **tokens, beta=d.normal(B, T, H), **gate, initial_state=pool, state_indices=indices
    )


def request(inputs: RecurrentInputs, **options: Any) -> Any:
    return request_of("fused_recurrent_kda", inputs, inplace_state=True, **BOUNDED_MODEL, **options)


def on_cpu(x: RecurrentInputs) -> RecurrentInputs:
    return RecurrentInputs(*(None if a is None else a.cpu() for a in x))


@pytest.mark.parametrize("v_first", [False, True])
def test_pool_beyond_two_to_the_31_elements(v_first: bool) -> None:
    H, K = 32, 128
    pool = torch.empty(2**31 // (H * K * K) + 8, H, K, K, device="cuda")
    assert pool[-1].storage_offset() > 2**31
    last = pool.shape[0] - 1
    pool[0].normal_()
    pool[last].normal_()
    inputs = draw(2, 1, H, K, pool, [last, 0])
    rows = pool[[last, 0]].clone()
    small = inputs._replace(initial_state=rows, state_indices=torch.tensor([0, 1], device="cuda"))
    want = oracle(request(small, output_final_state=True, state_v_first=v_first), on_cpu(small))
    got = recurrent.forward(request(inputs, state_v_first=v_first), inputs)
    assert error(got.o, want.o) < O_BOUND
    assert error(pool[[last, 0]], want.final_state) < STATE_BOUND


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_two_hundred_times(v_first: bool, T: int, dtype: torch.dtype) -> None:
    before = torch.randn(9, 32, 128, 128, device="cuda").to(dtype)
    pool = before.clone()
    inputs = draw(8, T, 32, 128, pool, [8, 1, 2, -1, 4, 5, 6, 7])
    given = request(inputs, state_v_first=v_first)
    first = recurrent.forward(given, inputs).o
    state = pool.clone()
    for _ in range(200):
        pool.copy_(before)
        assert torch.equal(recurrent.forward(given, inputs).o, first)
        assert torch.equal(pool, state)


@pytest.mark.parametrize("B", [1, 8, 64])
def test_launches_one_after_another_and_their_graph(B: int) -> None:
    """Each launch reads what the one before it wrote, and may have been placed before that one ended."""
    pool = torch.randn(B, 32, 128, 128, device="cuda")
    before, steps = pool.clone(), 16
    inputs = draw(B, steps, 32, 128, pool, list(range(B)))
    tokens = ("q", "k", "v", "g", "beta")
    single = [
        inputs._replace(**{name: getattr(inputs, name)[:, t : t + 1].contiguous() for name in tokens})
        for t in range(steps)
    ]
    want = recurrent.forward(request(inputs), inputs).o
    final = pool.clone()
    one = request(single[0])

    def run() -> list[torch.Tensor]:
        return [recurrent.forward(one, x).o for x in single]

    pool.copy_(before)
    assert torch.equal(torch.cat(run(), 1), want)
    assert torch.equal(pool, final)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        pool.copy_(before)
        graph.replay()
        assert torch.equal(torch.cat(out, 1), want)
        assert torch.equal(pool, final)


def public(x: RecurrentInputs, backend: str, **options: Any) -> torch.Tensor:
    """A single-token step as a server makes it. The third and later ones take the fast path."""
    arrays = {name: a for name, a in x._asdict().items() if a is not None}
    return kdacore.fused_recurrent_kda(
        **arrays, **BOUNDED_MODEL, inplace_state=True, backend=backend, **options
    )[0]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("v_first", [False, True])
def test_public_calls_by_the_shorter_way(backend: str, v_first: bool) -> None:
    """The same bits as the long way: eager, on another stream, in a graph, and for arrays that lie elsewhere."""
    if backend == "triton":
        pytest.importorskip("triton")
    before = torch.randn(9, 32, 128, 128, device="cuda")
    pool = before.clone()
    x = draw(8, 1, 32, 128, pool, [8, 1, 2, -1, 4, 5, 6, 7])
    options = {"state_v_first": v_first}
    want = public(x, backend, **options)
    state = pool.clone()

    def same(got: torch.Tensor) -> None:
        assert torch.equal(got, want)
        assert torch.equal(pool, state)

    for _ in range(4):
        pool.copy_(before)
        same(public(x, backend, **options))
    elsewhere = RecurrentInputs(*(None if a is None or a is pool else a.clone() for a in x))
    pool.copy_(before)
    same(public(elsewhere._replace(initial_state=pool), backend, **options))
    off = torch.empty(x.q.numel() + 1, dtype=x.q.dtype, device="cuda")[1:].view(x.q.shape).copy_(x.q)
    pool.copy_(before)
    same(public(x._replace(q=off), backend, **options))
    stream = torch.cuda.Stream()
    pool.copy_(before)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        pool.add_(0.0)
        got = public(x, backend, **options)
    stream.synchronize()
    same(got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = public(x, backend, **options)
    for _ in range(2):
        pool.copy_(before)
        graph.replay()
        same(out)
