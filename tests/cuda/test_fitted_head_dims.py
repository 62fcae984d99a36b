"""Chunk ops on CUDA, emulated, with head dims that no kernel has: forward and every gradient against the oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import MODEL, O_BOUND, STATE_BOUND, Draw, error, request_of

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_cuda import unsupported_calls
from kdacore_cuda.fitted_head_dims import fitted_request, is_fitted
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_gradients
from kdacore_cuda.forms.explain import form
from kdacore_cuda.forms.gated_delta import forward as gated_delta_forward
from kdacore_cuda.forms.gated_delta import gradients as gated_delta_gradients
from kdacore_reference.oracle import oracle_backward, oracle_forward

pytestmark = pytest.mark.usefixtures("poison")
KDA, GATED_DELTA = OPS = "chunk_kda", "chunk_gated_delta_rule"
FORWARDS = {KDA: chunk_forward, GATED_DELTA: gated_delta_forward}
GRADIENTS = {KDA: chunk_gradients, GATED_DELTA: gated_delta_gradients}
GRADIENT_BOUND = 8e-3
"""Contract section 4 for the gradients of 16-bit inputs."""
LOOSE = 2.0
"""Short sequences: the contract's hard-case factor."""
LENGTHS = [30, 0, 65]


def draw(op: str, K: int, V: int, T: int, H: int = 1, HV: int = 2, B: int = 1, **more: Any) -> ChunkInputs:
    d = Draw(K + V)
    gates = d.gate("init", B, T, HV, K)
    if op == GATED_DELTA:
        gates = {n: x if n == "A_log" else x[..., 0] for n, x in gates.items()}
    q, k, v = d.normal(B, T, H, K), d.normal(B, T, H, K), d.normal(B, T, HV, V)
    return ChunkInputs(q, k, v, beta=d.normal(B, T, HV), **gates)._replace(**more)


def packed(op: str, K: int, V: int) -> ChunkInputs:
    offsets = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    states = Draw(3).normal(len(LENGTHS), 2, K, V, dtype=torch.float32)
    return draw(op, K, V, sum(LENGTHS) + 5, cu_seqlens=offsets, initial_state=states)


def check_forward(op: str, inputs: ChunkInputs, **options: Any) -> None:
    r = request_of(op, inputs, output_final_state=True, **MODEL, **options)
    got, want = FORWARDS[op].forward(r, inputs), oracle_forward(r, inputs)
    for x, exact, bound in zip(got[:3], want[:3], (O_BOUND, STATE_BOUND, STATE_BOUND), strict=True):
        assert (x is None) == (exact is None)
        assert x is None or (error(x, exact) < LOOSE * bound and not x._is_view())


def check_gradients(op: str, inputs: ChunkInputs, **options: Any) -> InputGrads:
    r = request_of(op, inputs, output_final_state=True, **MODEL, **options)
    d = Draw(5)
    grads = OutputGrads(d.normal(*inputs.v.shape), 0.1 * d.normal(*r.state_shape, dtype=torch.float32))
    got, want = GRADIENTS[op].backward(r, inputs, (), grads), oracle_backward(r, inputs, grads)
    for name, x, exact in zip(InputGrads._fields, got, want, strict=True):
        given = getattr(inputs, name)
        assert (x is None) == (given is None)
        if x is not None:
            assert (x.dtype, x.shape) == (given.dtype, given.shape)
            assert not x._is_view(), name
            assert error(x, exact) < LOOSE * GRADIENT_BOUND, name
    return got


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("K", "V"), [(96, 192), (128, 256), (64, 320), (128, 72)])
def test_forward(emulated: list[str], op: str, K: int, V: int) -> None:
    """Also checkpoints, and states in both layouts."""
    check_forward(op, draw(op, K, V, 90), checkpoint_every=64)
    state = Draw(4).normal(1, 2, V, K, dtype=torch.bfloat16)
    check_forward(op, draw(op, K, V, 70, initial_state=state), state_v_first=True, allow_neg_eigval=True)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("K", "V"), [(64, 72), (96, 192), (128, 256)])
def test_gradients(emulated: list[str], op: str, K: int, V: int) -> None:
    check_gradients(op, packed(op, K, V))


@pytest.mark.parametrize("V", [64, 192])
def test_flat_biases(emulated: list[str], V: int) -> None:
    """``dt_bias`` as ``[HV*K]``, and its gradient."""
    inputs = draw(KDA, 64, V, 70)
    assert inputs.dt_bias is not None
    flat = inputs._replace(dt_bias=inputs.dt_bias.reshape(-1))
    check_gradients(KDA, flat)
    if V != 64:
        check_forward(KDA, flat)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_states_with_values_first(emulated: list[str], op: str) -> None:
    state = Draw(4).normal(1, 2, 192, 96, dtype=torch.float32)
    check_gradients(op, draw(op, 96, 192, 70, initial_state=state), state_v_first=True)


@pytest.mark.parametrize("op", OPS)
def test_without_gate_parameters(emulated: list[str], op: str) -> None:
    inputs = draw(op, 64, 192, 70)
    log = inputs._replace(g=-0.1 * inputs.g.abs().float(), A_log=None, dt_bias=None)
    r = request_of(op, log, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    grads = OutputGrads(Draw(5).normal(*log.v.shape), None)
    got, want = GRADIENTS[op].backward(r, log, (), grads), oracle_backward(r, log, grads)
    for name in ("q", "k", "v", "g", "beta"):
        assert error(getattr(got, name), getattr(want, name)) < LOOSE * GRADIENT_BOUND, name


@pytest.mark.parametrize("op", OPS)
def test_into_a_given_output(emulated: list[str], op: str) -> None:
    inputs = draw(op, 96, 192, 40)
    r = request_of(op, inputs, **MODEL)
    want = FORWARDS[op].forward(r, inputs).o
    given = inputs._replace(out=torch.full_like(inputs.v, 7.0))
    got = FORWARDS[op].forward(request_of(op, given, **MODEL), given).o
    assert got.data_ptr() == given.out.data_ptr()
    assert torch.equal(got, want)


@pytest.mark.parametrize("op", OPS)
def test_what_the_forward_saves_gives_the_same_gradients(emulated: list[str], op: str) -> None:
    inputs = draw(op, 64, 192, 130, HV=1)
    r = replace(request_of(op, inputs, disable_recompute=True, **MODEL), needs_grad=True)
    saved = FORWARDS[op].forward(r, inputs).saved
    grads = OutputGrads(Draw(5).normal(*inputs.v.shape), None)
    kept, made = (GRADIENTS[op].backward(r, inputs, x, grads) for x in (saved, ()))
    for a, b in zip(kept, made, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, np.asarray(b.double())) < GRADIENT_BOUND


# --- which calls -------------------------------------------------------------------------------------------------


def requested(op: str, K: int, V: int, **options: Any) -> Request:
    return request_of(op, draw(op, K, V, 70), **MODEL, **options)


def test_calls_that_kernels_are_made_for_are_left_alone() -> None:
    assert not is_fitted(requested(KDA, 64, 64))
    assert not any(is_fitted(requested(op, 128, 128)) for op in OPS)
    assert not is_fitted(requested(GATED_DELTA, 64, 96))
    assert is_fitted(requested(GATED_DELTA, 64, 100))


def test_the_call_that_is_made_instead(emulated: list[str]) -> None:
    r = requested(KDA, 96, 192)
    made = fitted_request(r)
    assert (made.HV, made.K, made.V, made.scale) == (4, 128, 128, r.scale)
    assert made.spec("dt_bias").shape == (4, 128)
    assert form(r).startswith("2 value heads of 128 for each, on copies, ")


def test_reasons() -> None:
    assert unsupported_calls.chunk_head_dims(requested(GATED_DELTA, 96, 192)) is None
    assert unsupported_calls.chunk_head_dims(requested(GATED_DELTA, 64, 64)) is None
    assert unsupported_calls.chunk_head_dims(requested(GATED_DELTA, 72, 72)) is not None
    assert unsupported_calls.chunk_head_dims(requested(KDA, 128, 512)) is None
    wide = unsupported_calls.chunk_head_dims(requested(KDA, 192, 192))
    assert wide is not None
    assert "K 64 to 128" in str(wide)
    pool = draw(KDA, 96, 96, 40, initial_state=torch.zeros(4, 2, 96, 96), state_indices=torch.tensor([1]))
    found = unsupported_calls.chunk_head_dims(request_of(KDA, pool, inplace_state=True, **MODEL))
    assert found is not None
    assert "pool" in str(found)
