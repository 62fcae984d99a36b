"""The hand-written backward on a GPU: each kernel against its model, the whole against the oracle, equal bits."""

from __future__ import annotations

from typing import Any

import chunk_backward_model as model
import numpy as np
import pytest
import torch
from chunk_backward_calls import draw, filled, launch, worst
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, error, request_of

import kdacore
from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward.kernels import grads_kernel, prepare_kernel, scan_kernel
from kdacore_cuda.kernel_parameters import SUM_SCALE
from kdacore_reference.oracle import oracle_backward

pytestmark = pytest.mark.gpu

BOUND = 8e-3
BOTH = pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "unbounded"])
PACK = [0, 1, 31, 64, 65, 0, 300]


def on_gpu(inputs: ChunkInputs) -> ChunkInputs:
    return ChunkInputs(*(None if x is None else x.cuda() for x in inputs))


def states(n: int) -> torch.Tensor:
    return torch.randn(n, 2, 128, 128, generator=torch.Generator().manual_seed(n))


def packed() -> ChunkInputs:
    cu = torch.tensor(np.cumsum([0, *PACK]), dtype=torch.int32)
    return draw(sum(PACK), 2, 2, cu_seqlens=cu, initial_state=states(len(PACK)))


CASES = {
    "dense": lambda: draw(300, 2, 2, B=2, initial_state=states(2)),
    "packed": packed,
    "grouped": lambda: draw(200, 2, 4),
}


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_each_kernel_against_its_model(name: str, bounded: bool) -> None:
    """In this order, so that the first that fails is the one that is wrong."""
    inputs = CASES[name]()
    options = BOUNDED_MODEL if bounded else MODEL
    request = request_of("chunk_kda", on_gpu(inputs), output_final_state=True, **options)
    d = Draw(3)
    do, d_final = d.normal(*inputs.v.shape), d.normal(*request.state_shape, dtype=torch.float32)
    where = filled(request, inputs)
    at = tuple(np.array(where).T)
    work = model.prepare(request, inputs)
    got = launch(prepare_kernel(False, bounded), request, inputs, {}, dict.fromkeys(work), device="cuda")
    assert worst(got["kg"] + got["kg_low"], work["kg"], where) < 1e-4
    del work["kg_low"]  # which part holds the last bit is the kernel's choice
    assert {k: e for k, x in work.items() if not (e := error(got[k][at], x[at])) < 1e-2} == {}

    work = model.prepare(request, inputs)
    scanned, d_h0 = model.scan(request, inputs, work, do, d_final)
    arrays = {"d_o": do, "d_ht": d_final}
    wanted: dict[str, Any] = dict.fromkeys(scanned)
    if d_h0 is not None:
        wanted["d_h0"] = (d_h0.shape, torch.float32)
    got = launch(scan_kernel(2), request, inputs, work, wanted, device="cuda", **arrays)
    assert {k: e for k, x in scanned.items() if not (e := error(got[k][at], x[at])) < 1e-2} == {}
    if d_h0 is not None:
        assert error(got["d_h0"], d_h0) < 1e-2

    want = model.grads(request, inputs, work | scanned, do)
    given = {k: (work | scanned)[k] for k in ("u", "dr", "h", "dh", "last", "rows")}
    kind = torch.float32 if request.HV != request.H else torch.bfloat16
    outputs: dict[str, Any] = {k: (want[k].shape, kind) for k in ("dq", "dk")}
    outputs |= {k: (want[k].shape, torch.bfloat16) for k in ("dv", "dg", "dbeta")}
    outputs |= {k: (want[k].shape, torch.float32) for k in ("dA_part", "dbias_part")}
    kernel = grads_kernel(False, request.HV != request.H, bounded)
    got = launch(kernel, request, inputs, given, outputs, device="cuda", d_o=do)
    for k in ("dq", "dk", "dv", "dg", "dbeta"):
        assert error(got[k], want[k]) < 1e-2, k
    for k in ("dA_part", "dbias_part"):
        assert error(got[k][at] / SUM_SCALE, want[k][at]) < 2e-2, k


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_the_whole_against_the_oracle(name: str, bounded: bool) -> None:
    options = BOUNDED_MODEL if bounded else MODEL
    inputs = CASES[name]()
    request = request_of("chunk_kda", inputs, output_final_state=True, **options)
    d = Draw(5)
    given = OutputGrads(d.normal(*inputs.v.shape), d.normal(*request.state_shape, dtype=torch.float32))
    want = oracle_backward(request, inputs, given)
    there = on_gpu(inputs)
    request = request_of("chunk_kda", there, output_final_state=True, **options)
    got = chunk_backward.backward(
        request, there, (), OutputGrads(*(None if x is None else x.cuda() for x in given))
    )
    for k in InputGrads._fields:
        mine, exact = getattr(got, k), getattr(want, k)
        assert (mine is None) == (exact is None)
        if mine is not None:
            assert error(mine, exact) < 2 * BOUND, k


def large(T: int = 2000, H: int = 80, seed: int = 0) -> tuple[Any, ChunkInputs, OutputGrads]:
    """More units and sequences-and-heads than run at once."""
    d = Draw(T + seed, device="cuda")
    tokens = {name: d.normal(1, T, H, 128) for name in ("q", "k", "v")}
    gate = {name: x.cuda() for name, x in d.gate("init", 1, T, H, 128).items()}
    inputs = ChunkInputs(**tokens, beta=d.normal(1, T, H), **gate)
    return request_of("chunk_kda", inputs, **BOUNDED_MODEL), inputs, OutputGrads(d.normal(1, T, H, 128))


def test_large_calls_agree_with_the_triton_backend() -> None:
    triton = pytest.importorskip("kdacore_triton.chunk_backward")
    request, inputs, given = large()
    got, want = (b.backward(request, inputs, (), given) for b in (chunk_backward, triton))
    for k, mine, other in zip(InputGrads._fields, got, want, strict=True):
        if mine is not None:
            assert error(mine, other.double().cpu()) < 2 * BOUND, k


def same(a: InputGrads, b: InputGrads) -> bool:
    return all(x is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("T", "H"), [(2000, 80), (8192, 16), (8192, 8), (8192, 4)])
def test_every_call_gives_the_same_bits(T: int, H: int) -> None:
    """One block a state, two, and in segments.

    Two calls in turns, which share their workspace: what a kernel reads too early is the other's.
    """
    calls = [large(T, H, seed) for seed in range(2)]

    def run(request: Any, inputs: ChunkInputs, given: OutputGrads) -> InputGrads:
        return chunk_backward.backward(request, inputs, (), given)

    first = [run(*call) for call in calls]
    assert not same(*first)
    for turn in range(25):
        found = [run(*call) for call in calls]
        apart = {
            name
            for got, want in zip(found, first, strict=True)
            for name, a, b in zip(InputGrads._fields, got, want, strict=True)
            if a is not None and not torch.equal(a, b)
        }
        assert not apart, turn


def test_graph_replay_equals_eager() -> None:
    request, inputs, given = large(300, 4)
    eager = chunk_backward.backward(request, inputs, (), given)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chunk_backward.backward(request, inputs, (), given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chunk_backward.backward(request, inputs, (), given)
    graph.replay()
    torch.cuda.synchronize()
    assert same(captured, eager)


def test_through_the_public_call() -> None:
    """Auto trains with it."""
    request, inputs, _ = large(200, 2)
    arrays = {k: x for k, x in inputs._asdict().items() if x is not None}
    leaves = {k: x.requires_grad_() for k, x in arrays.items()}
    options = {**BOUNDED_MODEL, "output_final_state": True}
    with kdacore.record_selections() as seen:
        o, state = kdacore.chunk_kda(**leaves, **options)
    assert seen[-1].backend == "cuda"
    (o.float().sum() + state.float().sum()).backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.any() for x in leaves.values())
    assert request.K == 128
