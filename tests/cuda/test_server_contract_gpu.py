"""Calls of servers on a GPU: against the oracle of single sequences, and in graphs whose indices and offsets change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of
from pool_checks import same_bits
from server_model import expected, poison_unused

from kdacore.types import ChunkInputs, OutputGrads, RecurrentInputs
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.recurrent import forward as recurrent

pytestmark = pytest.mark.gpu

TOKENS = ("q", "k", "v", "g", "beta")
GATES = pytest.mark.parametrize("options", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
IN_POOLS = {"inplace_state": True, "null_index": 0, "output_final_state": True}


def to_device(inputs: Any) -> Any:
    """Strides stay, of pools too."""
    return type(inputs)(*(None if x is None else _moved(x) for x in inputs))


def _moved(x: torch.Tensor) -> torch.Tensor:
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return there.copy_(x)


def pool_of(P: int, H: int, K: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows that do not lie side by side."""
    return 0.3 * Draw(seed).normal(P, 2, H, K, K, dtype=dtype)[:, 0]


def prefill(H: int, K: int, lengths: list[int], T: int, seed: int, **more: Any) -> ChunkInputs:
    d = Draw(seed)
    return ChunkInputs(
        **{name: d.normal(1, T, H, K) for name in ("q", "k", "v")},
        beta=d.normal(1, T, H),
        **d.gate("random", 1, T, H, K),
        cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        **more,
    )


def check(module: Any, op: str, inputs: Any, options: dict[str, Any]) -> None:
    request = request_of(op, inputs, **options)
    want = expected(request, inputs, options)
    there = to_device(poison_unused(request, inputs))
    request = request_of(op, there, **options)
    before = getattr(there, request.written_pool).clone()
    got = module.forward(request, there)
    unused = torch.arange(request.T) >= inputs.cu_seqlens[-1]
    assert error(got.o.cpu(), want.o) < 2 * O_BOUND
    assert not got.o[:, unused.cuda()].any()
    rows = torch.from_numpy(want.written)
    pool = getattr(there, request.written_pool)
    assert error(pool.cpu()[rows], want.pool[want.written]) < 2 * STATE_BOUND
    assert same_bits(pool[~rows.cuda()], before[~rows.cuda()])


@GATES
@pytest.mark.parametrize(("H", "K"), [(1, 128), (16, 128), (2, 64)], ids=["segments", "fused", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill(options: dict[str, Any], H: int, K: int, dtype: torch.dtype) -> None:
    lengths = [700, 0, 65, 40, 1, 33]
    inputs = prefill(
        *(H, K, lengths, 900, 1),
        initial_state=pool_of(9, H, K, dtype),
        state_indices=torch.tensor([3, 0, 4, -1, 6, 2]),
        has_initial_state=torch.tensor([True, True, False, True, True, True]),
        write_indices=torch.tensor([1, 2, 3, 4, -1, 5], dtype=torch.int32),
        write_pool=pool_of(12, H, K, dtype, seed=3),
        checkpoint_offsets=torch.tensor([128, 144, 16, 48, 672, 700, 716, 832]),
        checkpoint_indices=torch.tensor([6, 7, 8, 9, 10, 11, 0, -1]),
    )
    check(chunk_forward, "chunk_kda", inputs, options | IN_POOLS)


@pytest.mark.parametrize(("H", "K"), [(2, 128), (80, 128), (2, 64)], ids=["segments", "fused", "portable"])
def test_a_prefill_graph_whose_padding_changes(H: int, K: int) -> None:
    """Offsets, slots, the mask and the checkpoints of a captured call are those of each replay."""
    T, N, pool = 600, 5, pool_of(12, H, K).cuda()
    inputs = to_device(prefill(H, K, [T, 0, 0, 0, 0], T, 2))._replace(
        initial_state=pool,
        state_indices=torch.zeros(N, dtype=torch.int32, device="cuda"),
        has_initial_state=torch.ones(N, dtype=torch.bool, device="cuda"),
        checkpoint_offsets=torch.zeros(2, dtype=torch.int64, device="cuda"),
        checkpoint_indices=torch.zeros(2, dtype=torch.int32, device="cuda"),
    )
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL, **IN_POOLS)
    start = pool.clone()
    chunk_forward.forward(request, inputs)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chunk_forward.forward(request, inputs).o
    steps = (
        ([300, 0, 17, 64, 0], [5, 0, 3, 2, 0], [1, 1, 0, 1, 1], [160, 48], [7, 8]),
        ([1, 599, 0, 0, 0], [4, 5, 0, 0, 0], [1, 1, 1, 1, 1], [1, 129], [6, 9]),
        ([10, 20, 30, 40, 50], [1, -1, 2, 0, 3], [0, 1, 1, 1, 1], [60, 100], [0, 10]),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0], [-1, 0]),
    )
    for lengths, slots, mask, offsets, rows in steps:
        inputs.cu_seqlens.copy_(torch.tensor(np.cumsum([0, *lengths])))
        inputs.state_indices.copy_(torch.tensor(slots))
        inputs.has_initial_state.copy_(torch.tensor(mask).bool())
        inputs.checkpoint_offsets.copy_(torch.tensor(offsets))
        inputs.checkpoint_indices.copy_(torch.tensor(rows))
        pool.copy_(start)
        want = chunk_forward.forward(request, inputs).o
        states = pool.clone()
        pool.copy_(start)
        out.fill_(float("nan"))
        graph.replay()
        assert same_bits(out, want)
        assert same_bits(pool, states)
        assert not out[:, sum(lengths) :].any()


def test_a_decode_graph_whose_slots_change() -> None:
    N, H, K = 16, 8, 128
    pool, other = pool_of(40, H, K).cuda(), pool_of(40, H, K, seed=1).cuda()
    d = Draw(0)
    inputs = RecurrentInputs(
        **{name: d.normal(N, 1, H, K).cuda() for name in ("q", "k", "v")},
        beta=d.normal(N, 1, H).cuda(),
        **{name: x.cuda() for name, x in d.gate("random", N, 1, H, K).items()},
        initial_state=pool,
        state_indices=torch.zeros(N, dtype=torch.int32, device="cuda"),
        has_initial_state=torch.ones(N, dtype=torch.bool, device="cuda"),
        write_indices=torch.zeros(N, dtype=torch.int32, device="cuda"),
        write_pool=other,
    )
    request = request_of("fused_recurrent_kda", inputs, **BOUNDED_MODEL, **IN_POOLS)
    recurrent.forward(request, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = recurrent.forward(request, inputs).o
    rng = np.random.default_rng(0)
    for _ in range(8):
        reads = torch.from_numpy(rng.permutation(39)[:N] + 1)
        writes = torch.from_numpy(rng.permutation(39)[:N] + 1)
        reads[torch.from_numpy(rng.random(N) < 0.4)] = 0
        writes[torch.from_numpy(rng.random(N) < 0.2)] = -1
        inputs.state_indices.copy_(reads)
        inputs.write_indices.copy_(writes)
        inputs.has_initial_state.copy_(torch.from_numpy(rng.random(N) < 0.7))
        other.zero_()
        want = recurrent.forward(request, inputs).o.clone()
        states = other.clone()
        assert not want[(reads == 0).cuda()].any()
        assert want[(reads != 0).cuda()].flatten(1).any(1).all()
        other.zero_()
        graph.replay()
        assert same_bits(out, want)
        assert same_bits(other, states)


@pytest.mark.parametrize("HV", [2, 4])
def test_gradients_behind_a_pack(HV: int) -> None:
    """Zero, whatever is there; those of the tokens are the shorter pack's."""
    d, end, T = Draw(4, device="cuda"), 700, 1000
    inputs = ChunkInputs(
        q=d.normal(1, T, 2, 128),
        k=d.normal(1, T, 2, 128),
        v=d.normal(1, T, HV, 128),
        beta=d.normal(1, T, HV),
        **{name: x.cuda() for name, x in d.gate("random", 1, T, HV, 128).items()},
        cu_seqlens=torch.tensor([0, 300, 300, end], device="cuda"),
    )
    do = d.normal(*inputs.v.shape)
    short = inputs._replace(**{n: getattr(inputs, n)[:, :end].contiguous() for n in TOKENS})
    for x in (*(getattr(inputs, n) for n in TOKENS), do):
        x[:, end:] = float("nan")
    got, want = (
        chunk_backward.backward(request_of("chunk_kda", x, **BOUNDED_MODEL), x, (), OutputGrads(y, None))
        for x, y in ((inputs, do), (short, do[:, :end].contiguous()))
    )
    for name in TOKENS:
        assert not getattr(got, name)[:, end:].any(), name
        assert same_bits(getattr(got, name)[:, :end], getattr(want, name)), name
    assert error(got.A_log.cpu(), want.A_log.cpu().numpy()) < 1e-5
