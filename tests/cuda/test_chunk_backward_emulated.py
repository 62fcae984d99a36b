"""The whole backward on Hopper, emulated on the CPU, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chunk_backward_calls import draw
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, error, request_of

from kdacore.types import ChunkInputs, InputGrads, OutputGrads
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_reference.oracle import oracle_backward

MORE = pytest.mark.exhaustive
BOUND = 8e-3
"""Contract section 4, gradients of 16-bit inputs; twice that on calls as short as these."""
SAFE_LOG: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0}


def check(inputs: ChunkInputs, *, final: bool = True, loose: float = 2.0, **options: Any) -> InputGrads:
    """Run, compare every gradient with the oracle, return what was computed."""
    request = request_of("chunk_kda", inputs, output_final_state=final, **options)
    d = Draw(17)
    do = d.normal(*inputs.v.shape)
    d_final = d.normal(*request.state_shape, dtype=torch.float32) if final else None
    want = oracle_backward(request, inputs, OutputGrads(do, d_final))
    got = chunk_backward.backward(request, inputs, (), OutputGrads(do, d_final))
    for name in InputGrads._fields:
        mine, exact = getattr(got, name), getattr(want, name)
        assert (mine is None) == (exact is None), name
        if mine is not None:
            given = getattr(inputs, name)
            assert mine.dtype == given.dtype and mine.shape == given.shape, name
            assert error(mine, exact) < loose * BOUND, name
    return got


@pytest.mark.parametrize("gate", ["random", "init", "slow", "fast"])
def test_gates(emulated: list[str], gate: str) -> None:
    options = BOUNDED_MODEL if gate in ("random", "init") else SAFE_LOG
    check(draw(150, gate=gate), **options)
    assert [name.split("-")[0] for name in emulated][:3] == ["prepare", "scan", "grads"]


@pytest.mark.parametrize("gate", ["random", "slow", "fast", "mixed"])
def test_gates_without_a_bound(emulated: list[str], gate: str) -> None:
    check(draw(150, gate=gate), **(MODEL if gate == "random" else {}))
    assert "BOUNDED0" in emulated[0] and "BOUNDED0" in emulated[2]


def test_pack_of_hard_lengths_with_states(emulated: list[str]) -> None:
    lengths = [0, 1, 31, 64, 65, 0, 40]
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    state = torch.randn(len(lengths), 1, 128, 128, generator=torch.Generator().manual_seed(1))
    # Drawn so that the gradient of A_log, one number here, is not what is left of terms that cancel.
    inputs = draw(sum(lengths), cu_seqlens=cu, initial_state=state, seed=1)
    got = check(inputs, state_v_first=True, **BOUNDED_MODEL)
    assert got.initial_state is not None


@pytest.mark.parametrize("lengths", [(70, 0, 33), (0, 0), pytest.param((1, 63, 0, 0), marks=MORE)])
@pytest.mark.parametrize("HV", [1, 2])
@pytest.mark.parametrize("gate", [torch.bfloat16, pytest.param(torch.float32, marks=MORE)], ids=str)
def test_rows_behind_a_pack(
    emulated: list[str], lengths: tuple[int, ...], HV: int, gate: torch.dtype
) -> None:
    """NaN there, in inputs and in the gradient of the output, reaches nothing; gradients there are zero."""
    T, end, d = sum(lengths) + 90, sum(lengths), Draw(3)
    cu = torch.tensor(np.cumsum([0, *lengths]))
    inputs = draw(T, 1, HV, cu_seqlens=cu, seed=2)
    inputs = inputs._replace(g=inputs.g.to(gate))
    do, beyond = d.normal(*inputs.v.shape), {}
    tokens = ("q", "k", "v", "g", "beta")
    for name in tokens:
        beyond[name] = getattr(inputs, name).clone()
        beyond[name][:, end:] = float("nan")
    poisoned = inputs._replace(**beyond)
    do[:, end:] = float("nan")
    request = request_of("chunk_kda", poisoned, **BOUNDED_MODEL)
    got = chunk_backward.backward(request, poisoned, (), OutputGrads(do, None))
    for name in tokens:
        assert not getattr(got, name)[:, end:].any(), name
    if not end:
        assert not got.A_log.any() and not got.dt_bias.any()
        return
    short = inputs._replace(**{name: getattr(inputs, name)[:, :end].contiguous() for name in tokens})
    request = request_of("chunk_kda", short, **BOUNDED_MODEL)
    want = chunk_backward.backward(request, short, (), OutputGrads(do[:, :end].contiguous(), None))
    for name in tokens:
        assert torch.equal(getattr(got, name)[:, :end], getattr(want, name)), name
    assert error(got.A_log, want.A_log.numpy()) < 1e-5
    assert error(got.dt_bias, want.dt_bias.numpy()) < 1e-5


def test_grouped_heads_float32_gates_and_strides(emulated: list[str]) -> None:
    d = Draw(5)
    wide = d.normal(2, 70, 3, 256)
    inputs = draw(70, 1, 2, B=2, q=wide[:, :, 1:2, :128], g=d.normal(2, 70, 2, 128, dtype=torch.float32))
    check(inputs, **BOUNDED_MODEL)


def test_nothing_flows_back(emulated: list[str]) -> None:
    """No gradient of the outputs: every gradient is exactly zero."""
    inputs = draw(70, initial_state=torch.randn(1, 1, 128, 128))
    request = request_of("chunk_kda", inputs, output_final_state=True, **BOUNDED_MODEL)
    got = chunk_backward.backward(request, inputs, (), OutputGrads(None, None))
    for name, x in got._asdict().items():
        assert x is not None and not x.any(), name


def test_later_tokens_without_a_gradient_change_no_bit(emulated: list[str]) -> None:
    inputs = draw(200)
    do = Draw(3).normal(1, 200, 1, 128)
    do[:, 100:] = 0
    request = request_of("chunk_kda", inputs, **BOUNDED_MODEL)
    first = chunk_backward.backward(request, inputs, (), OutputGrads(do, None))
    other = draw(200, seed=9)
    later = [torch.cat([a[:, :100], b[:, 100:]], 1) for a, b in zip(inputs[:5], other[:5], strict=True)]
    second = chunk_backward.backward(
        request,
        inputs._replace(**dict(zip(("q", "k", "v", "g", "beta"), later, strict=True))),
        (),
        OutputGrads(do, None),
    )
    for name in ("q", "k", "v", "g", "beta"):
        a, b = getattr(first, name), getattr(second, name)
        assert torch.equal(a[:, :100], b[:, :100]) and not a[:, 100:].any(), name
    assert torch.equal(first.A_log, second.A_log) and torch.equal(first.dt_bias, second.dt_bias)
