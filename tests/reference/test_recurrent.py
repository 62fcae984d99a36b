"""Token by token: the state pool, speculative decoding, and writing where the caller asked and
nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdacore.oracle.host_values import to_float64, to_numpy
from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import Backend

Make = Callable[..., Any]
Error = Callable[[Any, Any], float]
KINDS = ["numpy", "torch", "jax"]
P, N = 7, 4


def pool_call(make_call: Make, *, T: int = 3, pool_dtype: Any = np.float32, **options: Any) -> Any:
    """``N`` sequences of ``T`` tokens and a pool of ``P`` rows."""
    call = make_call(op="fused_recurrent_kda", B=N, T=T, H=2, HV=4, K=8, V=6, **options)
    pool = call.rng.standard_normal((P, *call.request.state_shape[1:])).astype(pool_dtype)
    return call.replaced({"pool_size": P, "state_indices_ndim": 1}, initial_state=pool)


def forward(backend: Backend, call: Any) -> Any:
    return backend.ops[call.request.op].forward(call.request, call.inputs)


@pytest.mark.jax_later
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_in_place_pool_with_indices(
    kind: str, v_first: bool, returned: bool, make_call: Make, backend: Backend, error: Error
) -> None:
    call = pool_call(make_call, state_v_first=v_first, output_final_state=returned, inplace_state=True)
    call = call.replaced(state_indices=np.array([5, -1, 0, 2], dtype=np.int32))
    expected = oracle_forward(call.request, call.inputs)
    before = call.inputs.initial_state.copy()
    call = call.of_kind(kind)
    out = forward(backend, call)
    assert error(out.o, expected.o) < 2e-5
    if kind == "jax" and not returned:
        assert out.final_state is None
        return
    after = out.final_state if kind == "jax" else call.inputs.initial_state
    if kind != "jax":
        assert (out.final_state is call.inputs.initial_state) == returned
        assert returned or out.final_state is None
    untouched = [1, 3, 4, 6]
    np.testing.assert_array_equal(to_numpy(after)[untouched], before[untouched])
    assert error(after, expected.final_state) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_pool_read_only_by_default(kind: str, make_call: Make, backend: Backend, error: Error) -> None:
    """Without ``inplace_state`` the states come back fresh, that of "no slot" zero, as its output."""
    call = pool_call(make_call).replaced(state_indices=np.array([5, -3, 0, 2], dtype=np.int64))
    expected = oracle_forward(call.request, call.inputs)
    before = call.inputs.initial_state.copy()
    call = call.of_kind(kind)
    out = forward(backend, call)
    np.testing.assert_array_equal(to_numpy(call.inputs.initial_state), before)
    assert tuple(out.final_state.shape) == call.request.state_shape
    assert error(out.o, expected.o) < 2e-5 and error(out.final_state, expected.final_state) < 2e-5
    assert not to_numpy(out.o)[1].any() and not to_numpy(out.final_state)[1].any()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_in_place_without_indices(kind: str, make_call: Make, backend: Backend, error: Error) -> None:
    call = make_call(op="fused_recurrent_kda", B=3, T=5, inplace_state=True)
    expected = oracle_forward(call.request, call.inputs)
    call = call.of_kind(kind)
    out = forward(backend, call)
    assert out.final_state is call.inputs.initial_state
    assert error(out.final_state, expected.final_state) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_tokens(kind: str, make_call: Make, backend: Backend, error: Error) -> None:
    """Start from the state after the last accepted token; keep the state after each of the new
    ones."""
    T = 3
    call = pool_call(make_call, T=T, inplace_state=True)
    P2 = 16
    pool = call.rng.standard_normal((P2, *call.request.state_shape[1:])).astype(np.float32)
    table = np.array([[0, 1, 2], [3, -1, 5], [6, 7, 8], [9, 10, 11]], dtype=np.int32)
    accepted = np.array([1, 2, 0, 3], dtype=np.int32)
    call = call.replaced(
        {"pool_size": P2, "state_indices_ndim": 2},
        initial_state=pool.copy(),
        state_indices=table,
        num_accepted_tokens=accepted,
    )
    expected = oracle_forward(call.request, call.inputs)
    # The same from single-token calls without any pool.
    want = pool.astype(np.float64)
    for n in range(N):
        start = table[n, accepted[n] - 1]
        S = pool[start][None] if accepted[n] else np.zeros_like(pool[:1])
        if accepted[n] and start < 0:  # no slot: padding
            assert not expected.o[n].any()
            continue
        for t in range(T):
            cut = {
                name: getattr(call.inputs, name)[n : n + 1, t : t + 1]
                for name in ("q", "k", "v", "g", "beta")
            }
            one = call.replaced(
                {"B": 1, "N": 1, "T": 1, "pool_size": 0, "state_indices_ndim": 0, "inplace_state": False},
                **cut,
                initial_state=S,
                state_indices=None,
                num_accepted_tokens=None,
            )
            S = oracle_forward(one.request, one.inputs).final_state
            if table[n, t] >= 0:
                want[table[n, t]] = S[0]
    assert error(expected.final_state, want) < 1e-12

    call = call.of_kind(kind)
    out = forward(backend, call)
    untouched = [3, 4, 5, 12, 13, 14, 15]
    np.testing.assert_array_equal(to_numpy(out.final_state)[untouched], pool[untouched])
    assert error(out.o, expected.o) < 2e-5 and error(out.final_state, expected.final_state) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_read_only_verification(kind: str, make_call: Make, backend: Backend, error: Error) -> None:
    call = pool_call(make_call, T=16, read_only_state=True, output_final_state=False)
    call = call.replaced(state_indices=np.array([1, 2, -1, 6], dtype=np.int32))
    before = call.inputs.initial_state.copy()
    expected = oracle_forward(call.request, call.inputs)
    call = call.of_kind(kind)
    out = forward(backend, call)
    assert out.final_state is None and error(out.o, expected.o) < 2e-5
    np.testing.assert_array_equal(to_numpy(call.inputs.initial_state), before)


def test_half_precision_pool_is_rounded_only_when_written(
    make_call: Make, backend: Backend, error: Error
) -> None:
    call = pool_call(
        make_call,
        T=40,
        pool_dtype=ml_dtypes.bfloat16,
        state_dtype="bfloat16",
        inplace_state=True,
        gates="slow",
    )
    call = call.replaced(state_indices=np.array([1, 2, 3, 6], dtype=np.int32))
    expected = oracle_forward(call.request, call.inputs)
    out = forward(backend, call)
    assert out.final_state.dtype == ml_dtypes.bfloat16
    assert error(out.o, expected.o) < 2e-5
    rounded = expected.final_state.astype(ml_dtypes.bfloat16)
    assert error(out.final_state, to_float64(rounded)) < 3e-4


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_pool_rows_of_any_stride(kind: str, make_call: Make, backend: Backend, error: Error) -> None:
    """The pool is a slice of a larger buffer; what lies between its rows stays as it was."""
    call = pool_call(make_call, inplace_state=True)
    indices = np.array([5, -1, 0, 2], dtype=np.int32)
    dense = call.replaced(state_indices=indices)
    expected = oracle_forward(dense.request, dense.inputs)
    shape = call.inputs.initial_state.shape
    buffer = np.full((P, 3, *shape[1:-1], shape[-1] + 5), 1e30, dtype=np.float32)
    buffer[:, 1, ..., 2:-3] = call.inputs.initial_state
    before = buffer.copy()
    if kind == "torch":
        import torch

        memory = torch.from_numpy(buffer)
        call = dense.of_kind("torch").replaced(initial_state=memory[:, 1, ..., 2:-3])
    else:
        call = dense.replaced(initial_state=buffer[:, 1, ..., 2:-3])
    out = forward(backend, call)
    assert error(out.o, expected.o) < 2e-5
    assert error(call.inputs.initial_state, expected.final_state) < 2e-5
    changed = np.zeros(buffer.shape, dtype=bool)
    changed[[5, 0, 2], 1, ..., 2:-3] = True
    np.testing.assert_array_equal(buffer[~changed], before[~changed])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("lengths", [None, [2, 0, 5]], ids=str)
def test_output_is_written_where_asked(
    kind: str, lengths: list[int] | None, make_call: Make, backend: Backend, error: Error, to_kind: Any
) -> None:
    call = make_call(op="fused_recurrent_kda", B=2, T=3, lengths=lengths)
    r = call.request
    expected = oracle_forward(r, call.inputs)
    buffer = np.full((r.B, r.T, r.HV, r.V + 2), 7.0, dtype=np.float32)
    whole = to_kind(buffer, kind)
    call = call.of_kind(kind).replaced(out=whole[..., 1:-1])
    out = forward(backend, call)
    assert out.o is call.inputs.out
    assert error(out.o, expected.o) < 2e-5
    assert (to_numpy(whole)[..., [0, -1]] == 7.0).all()


@pytest.mark.parametrize("op", ["fused_recurrent_kda", "fused_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("lengths", [None, [4, 0, 1, 30, 1], [0]], ids=str)
def test_options(op: str, lengths: list[int] | None, make_call: Make, backend: Backend, error: Error) -> None:
    call = make_call(
        op=op, B=2, T=9, lengths=lengths, HV=4, V=10, gate="softplus", qk_l2norm=True, beta_sigmoid=True
    )
    expected = oracle_forward(call.request, call.inputs)
    out = forward(backend, call)
    assert error(out.o, expected.o) < 2e-5 and error(out.final_state, expected.final_state) < 2e-5


def test_torch_leaf_tensors_are_taken_as_values(make_call: Make, backend: Backend, error: Error) -> None:
    """Tensors that require grad, in-place pool included: the join outside owns autograd."""
    call = pool_call(make_call, inplace_state=True).replaced(state_indices=np.array([0, 1, 2, 3]))
    expected = oracle_forward(call.request, call.inputs)
    call = call.of_kind("torch")
    for name in ("q", "k", "v", "g", "beta"):
        getattr(call.inputs, name).requires_grad_(True)
    out = forward(backend, call)
    assert not out.o.requires_grad and error(out.o, expected.o) < 2e-5
