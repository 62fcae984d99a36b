"""``chunk_kda`` with head dims other than 128 on a GPU: kernels that read and write the caller's arrays as they lie.
Against the oracle, and in a graph."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, check_outputs, error, oracle, request_of

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda.forms import chunk_forward, own_head_dims
from kdacore_cuda.forms.backward import gradients
from kdacore_reference.oracle import oracle_backward

pytestmark = pytest.mark.gpu
DIMS = [(64, 64), (128, 256), (96, 192), (80, 112)]
LENGTHS = (300, 0, 65, 1, 128)
GRADIENT_BOUND, LOOSE = 8e-3, 2.0


def draw(dims: tuple[int, int], T: int, H: int, HV: int, *, B: int = 1, **more: Any) -> ChunkInputs:
    (K, V), d = dims, Draw(T + HV, device="cuda")
    gates = {name: x.cuda() for name, x in d.gate("init", B, T, HV, K).items()}
    q, k, v = d.normal(B, T, H, K), d.normal(B, T, H, K), d.normal(B, T, HV, V)
    return ChunkInputs(q, k, v, beta=d.normal(B, T, HV), **gates)._replace(**more)


def packed(dims: tuple[int, int], HV: int) -> ChunkInputs:
    offsets = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    states = Draw(3, device="cuda").normal(len(LENGTHS), HV, *dims, dtype=torch.float32)
    return draw(dims, sum(LENGTHS) + 9, HV // 2, HV, cu_seqlens=offsets, initial_state=states)


CASES = {
    "32 heads": lambda dims: draw(dims, 500, 32, 32),
    "60 value heads": lambda dims: draw(dims, 333, 20, 60),
    "batch": lambda dims: draw(dims, 200, 12, 12, B=4),
    "pack": lambda dims: packed(dims, 14),
}


def step(r: Request, inputs: ChunkInputs, grads: OutputGrads) -> tuple[Any, InputGrads]:
    out = chunk_forward.forward(r, inputs)
    return out, gradients.backward(r, inputs, out.saved, grads)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("model", [BOUNDED_MODEL, MODEL], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("saves", [False, True], ids=["recomputed", "saved"])
def test_against_the_oracle(dims: tuple[int, int], name: str, model: dict[str, Any], saves: bool) -> None:
    inputs = CASES[name](dims)
    options = model | {"output_final_state": True, "disable_recompute": saves}
    r = replace(request_of("chunk_kda", inputs, **options), needs_grad=True)
    assert own_head_dims.serves_forward(r) and own_head_dims.serves_backward(r)
    d = Draw(5, device="cuda")
    grads = OutputGrads(d.normal(*inputs.v.shape), 0.1 * d.normal(*r.state_shape, dtype=torch.float32))
    out, got = step(r, inputs, grads)
    check_outputs(out, oracle(r, inputs), LOOSE)
    for field, x, exact in zip(InputGrads._fields, got, oracle_backward(r, inputs, grads), strict=True):
        assert (x is None) == (exact is None), field
        assert x is None or error(x, exact) < LOOSE * GRADIENT_BOUND, field


@pytest.mark.parametrize("dims", DIMS[:2], ids=str)
def test_graphs_give_the_same_bits(dims: tuple[int, int]) -> None:
    inputs = draw(dims, 700, 32, 32)
    r = replace(request_of("chunk_kda", inputs, **MODEL), needs_grad=True)
    grads = OutputGrads(Draw(5, device="cuda").normal(*inputs.v.shape), None)
    want, want_grads = step(r, inputs, grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, found = step(r, inputs, grads)
    for x in (out.o, *[x for x in found if x is not None]):
        x.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out.o, want.o)
    for a, b in zip(found, want_grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
