"""What only a GPU can show of the decode kernel: pools past 2^31 elements, graph capture, streams, host time."""

import os
import statistics
import time
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kdacore import contract
from kdacore.ops import OPS
from kdacore.types import RecurrentInputs, Request
from kdacore_triton import recurrent

pytestmark = pytest.mark.gpu


def decode_step(B: int, H: int, pool: torch.Tensor, index: torch.Tensor, seed: int = 0) -> RecurrentInputs:
    K = pool.shape[-1]
    rng = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cuda").bfloat16()

    return RecurrentInputs(
        q=normal(B, 1, H, K), k=normal(B, 1, H, K), v=normal(B, 1, H, K), g=normal(B, 1, H, K),
        beta=normal(B, 1, H), A_log=torch.rand(H, device="cuda"), dt_bias=torch.randn(H, K, device="cuda"),
        initial_state=pool, state_indices=index,
    )  # fmt: skip


def request_of(x: RecurrentInputs, **options: Any) -> Request:
    opdef = OPS["fused_recurrent_kda"]
    fused = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
    given = (
        dict.fromkeys(opdef.options, False)
        | dict.fromkeys(fused, True)
        | {"scale": None, "lower_bound": -5.0, "null_index": None}
    )
    given |= options
    return contract.build_request(opdef, x, tuple(given[o] for o in opdef.options))[0]


def small_copy(x: RecurrentInputs, rows: torch.Tensor) -> RecurrentInputs:
    """The same call on a pool of just the rows named."""
    return x._replace(
        initial_state=x.initial_state[rows].clone(),
        state_indices=torch.arange(len(rows), device="cuda", dtype=torch.int32),
    )


def test_pool_beyond_32_bit_offsets() -> None:
    H, K, P = 32, 128, 4200
    pool = torch.empty(P, H, K, K, dtype=torch.bfloat16, device="cuda")
    assert pool.numel() > 2**31
    pool.normal_()
    rows = torch.tensor([4199, 0, 4097, 2048], device="cuda")
    x = decode_step(4, H, pool, rows.int())
    small = small_copy(x, rows)
    before = pool.clone()
    got = recurrent.forward(request_of(x, inplace_state=True), x)
    want = recurrent.forward(request_of(small, inplace_state=True), small)
    assert torch.equal(got.o, want.o)
    assert torch.equal(pool[rows], small.initial_state)
    before[rows] = small.initial_state
    assert torch.equal(pool.view(torch.int16), before.view(torch.int16)), "another row was touched"


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_graph_replay_equals_eager(state: torch.dtype) -> None:
    pool = torch.randn(12, 4, 64, 64, device="cuda").to(state)
    x = decode_step(3, 4, pool, torch.tensor([7, -1, 2], device="cuda", dtype=torch.int32))
    request = request_of(x, inplace_state=True)
    eager_pool = pool.clone()
    eager = x._replace(initial_state=eager_pool)
    want = [recurrent.forward(request, eager).o for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = recurrent.forward(request, x).o
    for step in want:
        graph.replay()
        assert torch.equal(o, step)
    assert torch.equal(pool, eager_pool)


def test_current_stream_is_used() -> None:
    pool = torch.zeros(4, 4, 64, 64, device="cuda")
    x = decode_step(2, 4, pool, torch.tensor([3, 1], device="cuda", dtype=torch.int32))
    request = request_of(x, inplace_state=True)
    want = recurrent.forward(request, x).o
    pool.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        pool.add_(0.0)
        got = recurrent.forward(request, x).o
    stream.synchronize()
    assert torch.equal(got, want)


def test_host_time_of_a_decode_step() -> None:
    """Planned and launched in under 20 us of host time, everything fused."""
    pool = torch.zeros(4, 4, 64, 64, device="cuda")
    x = decode_step(2, 4, pool, torch.tensor([3, 1], device="cuda", dtype=torch.int32))
    request = request_of(x, inplace_state=True)
    recurrent.forward(request, x)
    step = recurrent.fast_path(request, x)
    assert step is not None
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            step(x)
        times.append((time.perf_counter() - start) / 100)
    assert statistics.median(times) < 20e-6
