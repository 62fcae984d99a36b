"""What only a GPU can show of servers' calls: replayed graphs, pools past 2^31 elements, bits, host time."""

import statistics
import time
from typing import Any

import pytest
import torch

from kdacore import contract
from kdacore.ops import OPS
from kdacore.types import Request
from kdacore_triton import chunk_forward, recurrent

pytestmark = pytest.mark.gpu

OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
RUN = {"chunk_kda": chunk_forward.forward, "fused_recurrent_kda": recurrent.forward}


def request_of(op: str, x: Any, **options: Any) -> Request:
    given = OPTIONS | options
    values = [given.get(o.name, o.default) for o in OPS[op].option_arguments]
    return contract.build_request(OPS[op], x, tuple(values))[0]


def numbers(*values: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=kind)


def tokens(op: str, T: int, H: int, B: int = 1, K: int = 128, seed: int = 0, **arrays: Any) -> Any:
    rng = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device="cuda").bfloat16()

    return OPS[op].inputs(
        q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, H, K), g=normal(B, T, H, K),
        beta=normal(B, T, H), A_log=torch.rand(H, device="cuda"), dt_bias=torch.randn(H, K, device="cuda"), **arrays,
    )  # fmt: skip


STEPS = [
    {
        "cu_seqlens": [0, 900, 900, 2100, 2100],
        "state_indices": [3, 0, 5, -1],
        "checkpoint_offsets": [512, 1412],
    },
    {"cu_seqlens": [0, 10, 1200, 1300, 2200], "state_indices": [2, 7, 0, 4], "checkpoint_offsets": [1034, 0]},
    {
        "cu_seqlens": [0, 2304, 2304, 2304, 2304],
        "state_indices": [6, 0, 0, 0],
        "checkpoint_offsets": [16, 2048],
    },
]


@pytest.mark.parametrize("H", [4, 12, 64])
def test_a_replayed_prefill_reads_its_offsets_and_rows(H: int) -> None:
    """Padding, null slots, sequences that start from zeros and checkpoints all change between replays."""
    x = tokens(
        "chunk_kda", 2304, H, initial_state=torch.randn(12, H, 128, 128, device="cuda"),
        cu_seqlens=numbers(0, 0, 0, 0, 0), state_indices=numbers(0, 0, 0, 0),
        has_initial_state=torch.tensor([True, False, True, True], device="cuda"),
        checkpoint_offsets=numbers(0, 0), checkpoint_indices=numbers(-1, -1),
        out=torch.zeros(1, 2304, H, 128, device="cuda", dtype=torch.bfloat16),
    )  # fmt: skip
    request = request_of("chunk_kda", x, inplace_state=True, null_index=0)
    forward = RUN["chunk_kda"]
    forward(request, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(request, x)
    eager = x._replace(initial_state=x.initial_state.clone(), out=x.out.clone())
    for step in STEPS:
        for name, values in (step | {"checkpoint_indices": [10, 11]}).items():
            getattr(x, name).copy_(numbers(*values))
        x.has_initial_state.logical_not_()
        forward(request, eager)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x.out, eager.out) and torch.equal(x.initial_state, eager.initial_state)
        end = step["cu_seqlens"][-1]
        assert torch.isfinite(x.out[:, :end]).all()


def test_a_replayed_decode_reads_its_rows() -> None:
    x = tokens(
        "fused_recurrent_kda", 1, 4, B=3, initial_state=torch.randn(9, 4, 128, 128, device="cuda"),
        state_indices=numbers(0, 0, 0), write_indices=numbers(0, 0, 0),
        has_initial_state=torch.ones(3, dtype=torch.bool, device="cuda"),
    )  # fmt: skip
    request = request_of("fused_recurrent_kda", x, inplace_state=True, null_index=0)
    forward = RUN["fused_recurrent_kda"]
    forward(request, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = forward(request, x).o
    eager = x._replace(initial_state=x.initial_state.clone())
    for read, write in (([3, 0, 5], [1, 2, 6]), ([1, 6, -1], [0, 7, 8]), ([0, 0, 4], [1, 1, 4])):
        x.state_indices.copy_(numbers(*read))
        x.write_indices.copy_(numbers(*write))
        x.has_initial_state[1] = not bool(x.has_initial_state[1])
        want = forward(request, eager).o
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, want) and torch.equal(x.initial_state, eager.initial_state)
        padding = [i for i, row in enumerate(read) if row <= 0]
        assert not o[padding].any()


@pytest.mark.parametrize("op", list(RUN))
def test_rows_beyond_32_bit_offsets(op: str) -> None:
    """The highest rows are read, written and kept as checkpoints, as those of a small pool are."""
    H, P = 32, 4200
    pool = torch.empty(P, H, 128, 128, dtype=torch.bfloat16, device="cuda").normal_()
    assert pool.numel() > 2**31
    x = tokens(
        op, 70, H, initial_state=pool, cu_seqlens=numbers(0, 40, 64), state_indices=numbers(4199, 4100)
    )
    rows, kept = [4199, 4100, 4198, 4150], {}
    if op == "chunk_kda":
        kept = {"checkpoint_offsets": numbers(16, 56), "checkpoint_indices": numbers(4197, 4097)}
        rows += [4197, 4097]
    x = x._replace(write_indices=numbers(4198, 4150), **kept)
    small = x._replace(
        initial_state=pool[rows].clone(), state_indices=numbers(0, 1), write_indices=numbers(2, 3),
        **({"checkpoint_indices": numbers(4, 5)} if kept else {}),
    )  # fmt: skip
    want = RUN[op](request_of(op, small, inplace_state=True), small)
    others = torch.ones(P, dtype=torch.bool, device="cuda")
    others[rows[2:]] = False
    before = pool[others].clone()
    got = RUN[op](request_of(op, x, inplace_state=True), x)
    assert torch.equal(got.o, want.o)
    assert torch.equal(pool[rows], small.initial_state)
    assert torch.equal(pool[others], before), "another row was touched"


@pytest.mark.parametrize("H", [4, 12, 64])
def test_pools_change_no_bit(H: int) -> None:
    """A prefill from and into a pool, with a checkpoint, gives what the plain call gives."""
    x = tokens("chunk_kda", 2304, H, initial_state=torch.randn(1, H, 128, 128, device="cuda"))
    plain = RUN["chunk_kda"](request_of("chunk_kda", x, output_final_state=True, checkpoint_every=1024), x)
    pool = torch.zeros(4, H, 128, 128, device="cuda")
    pool[2] = x.initial_state[0]
    y = x._replace(
        initial_state=pool, state_indices=numbers(2), write_indices=numbers(3), checkpoint_offsets=numbers(1024),
        checkpoint_indices=numbers(1),
    )  # fmt: skip
    got = RUN["chunk_kda"](request_of("chunk_kda", y, inplace_state=True), y)
    assert torch.equal(got.o, plain.o)
    assert torch.equal(pool[3], plain.final_state[0]) and torch.equal(pool[1], plain.checkpoints[0, 1])
    assert torch.equal(pool[2], x.initial_state[0]) and not pool[0].any()


def test_host_time_of_a_decode_step_with_rows_of_its_own() -> None:
    """As quick on the host as decoding in place: the fast path serves it."""
    pool, other = (torch.zeros(5, 4, 128, 128, device="cuda") for _ in range(2))
    x = tokens("fused_recurrent_kda", 1, 4, B=2, initial_state=pool, state_indices=numbers(3, 1))
    y = x._replace(
        write_indices=numbers(2, 4),
        write_pool=other,
        has_initial_state=torch.ones(2, dtype=torch.bool, device="cuda"),
    )
    medians = []
    for inputs, options in ((x, {}), (y, {"null_index": 0})):
        request = request_of("fused_recurrent_kda", inputs, inplace_state=True, **options)
        recurrent.forward(request, inputs)
        step = recurrent.fast_path(request, inputs)
        assert step is not None
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                step(inputs)
            times.append((time.perf_counter() - start) / 100)
        medians.append(statistics.median(times))
    assert medians[1] < 1.15 * medians[0] + 0.5e-6, medians
