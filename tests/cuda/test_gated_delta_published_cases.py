"""Cases and tolerances that flash-linear-attention publishes among its tests of the gated delta rule, with our inputs,
oracle and code: queries of any length, betas of 1, gates of which half are 0; emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import Draw, error, request_of

from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.forms.gated_delta import gradients
from kdacore_reference.oracle import oracle_backward, oracle_forward

pytestmark = pytest.mark.usefixtures("emulated", "poison")
OP, HEADS, SIZE = "chunk_gated_delta_rule", 2, 128
OUTPUT = 0.005
GRADIENTS = {"q": 0.008, "k": 0.008, "v": 0.008, "beta": 0.02, "g": 0.02, "initial_state": 0.008}
OF_PACK = {"q": 0.007, "k": 0.008, "v": 0.007, "beta": 0.015, "g": 0.015, "initial_state": 0.007}
exhaustive = pytest.mark.exhaustive


def draw(B: int, T: int, N: int, divisor: float, zeros: float, seed: int, **arrays: Any) -> ChunkInputs:
    d = Draw(seed)
    g = torch.nn.functional.logsigmoid(d.uniform(B, T, HEADS)) / divisor
    g = g * (d.uniform(B, T, HEADS) > zeros)
    tokens = d.normal(B, T, HEADS, SIZE), d.unit(B, T, HEADS, SIZE), d.normal(B, T, HEADS, SIZE)
    state = torch.zeros(N, HEADS, SIZE, SIZE)
    inputs = ChunkInputs(*tokens, g, torch.ones(B, T, HEADS), initial_state=state)
    return inputs._replace(**arrays)


def check(inputs: ChunkInputs, scale: float, bounds: dict[str, float]) -> None:
    r = request_of(OP, inputs, scale=scale, output_final_state=True)
    got, want = gated_delta.forward(r, inputs), oracle_forward(r, inputs)
    assert error(got.o, want.o) < OUTPUT
    assert error(got.final_state, want.final_state) < OUTPUT
    d = Draw(5)
    grads = OutputGrads(d.normal(*inputs.v.shape), d.normal(*r.state_shape, dtype=torch.float32))
    found, exact = gradients.backward(r, inputs, (), grads), oracle_backward(r, inputs, grads)
    for name, bound in bounds.items():
        i = InputGrads._fields.index(name)
        assert error(found[i], exact[i]) < bound, name


@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("scale", [1.0, pytest.param(0.1, marks=exhaustive)])
@pytest.mark.parametrize(
    "divisor", [1.0, pytest.param(0.1, marks=exhaustive), pytest.param(10.0, marks=exhaustive)]
)
@pytest.mark.parametrize(
    "T", [15, 63, pytest.param(1, marks=exhaustive), pytest.param(300, marks=exhaustive)]
)
def test_batches(T: int, divisor: float, scale: float, zeros: float) -> None:
    check(draw(2, T, 2, divisor, zeros, seed=T), scale, GRADIENTS)


@pytest.mark.exhaustive
def test_a_pack() -> None:
    offsets = torch.tensor([0, 122, 229, 400, 1000])
    state = Draw(3).normal(4, HEADS, SIZE, SIZE, dtype=torch.float32)
    inputs = draw(1, 1000, 4, 1.0, 0.5, seed=4, cu_seqlens=offsets, initial_state=state)
    check(inputs._replace(beta=Draw(6).uniform(1, 1000, HEADS).sigmoid()), 1.0, OF_PACK)
