"""The chunked ops against the oracle: every option, every array kind, the contract's hard cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_backward, oracle_forward
from kdacore.types import Backend, OutputGrads

Make = Callable[..., Any]
Error = Callable[[Any, Any], float]

BASE = {"B": 2, "T": 130, "H": 2, "K": 16, "V": 16}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"HV": 6},
    {"state_v_first": True, "V": 24},
    {"initial": False, "output_final_state": False},
    {"qk_l2norm": True, "beta_sigmoid": True},
    {"beta_sigmoid": True, "neg_eigval": True, "HV": 4},
    {"gate": "softplus", "HV": 4},
    {"gate": "sigmoid", "lower_bound": -5.0, "safe_gate": True},
    {"gate": "sigmoid", "lower_bound": -5.0, "safe_gate": True, "qk_l2norm": True, "HV": 4},
    # With scale 0 only the last state has gradients; 130 tokens of random gates would shrink the initial state's to
    # float32's subnormal numbers, which have too few digits for the bound.
    {"scale": 0.0, "gates": "slow"},
    {"scale": 0.0, "gates": "slow", "qk_l2norm": True},
    {"scale": 1e-25, "qk_l2norm": True, "HV": 4},
    {"op": "chunk_gated_delta_rule", "HV": 4},
    {"op": "chunk_gated_delta_rule", "gate": "softplus"},
    {"op": "chunk_gated_delta_rule", "gate": "sigmoid", "lower_bound": -2.0, "qk_l2norm": True},
    {"lengths": [70, 0, 1, 64, 65], "HV": 4},
    {"checkpoint_every": 64, "lengths": [130, 0, 64, 5], "state_v_first": True, "V": 8},
    {"checkpoint_every": 128},
    {"op": "fused_recurrent_kda", "T": 70, "qk_l2norm": True},
]


def check(
    call: Any, backend: Backend, error: Error, bound: dict[str, float], factor: float = 1.0
) -> dict[str, float]:
    """Forward and backward of ``call`` within ``factor`` times the bounds; returns the errors."""
    request = call.request
    op = backend.ops[request.op]
    expected = oracle_forward(request, call.inputs)
    out = op.forward(request, call.inputs)
    assert str(out.o.dtype).endswith(request.dtype)
    measured = {"o": error(out.o, expected.o)}
    assert (out.final_state is None) == (not request.output_final_state)
    assert (out.checkpoints is None) == (not request.checkpoint_every)
    if out.final_state is not None:
        assert str(out.final_state.dtype).endswith(request.state_dtype)
        measured["final_state"] = error(out.final_state, expected.final_state)
    if out.checkpoints is not None:
        assert str(out.checkpoints.dtype).endswith(request.state_dtype)
        measured["checkpoints"] = error(out.checkpoints, expected.checkpoints)
    for name, value in measured.items():
        assert value <= factor * bound["o" if name == "o" else "state"], (name, value)

    numpy_grads = call.grads()
    wanted = oracle_backward(request, call.inputs, numpy_grads)
    kind = type(numpy_grads)
    grads = kind(*(None if g is None else _like_kind(g, request.kind) for g in numpy_grads))
    got = op.backward(request, call.inputs, out.saved, grads)
    for name, want in wanted._asdict().items():
        value = getattr(got, name)
        given = getattr(call.inputs, name)
        assert (value is None) == (given is None), name
        if given is None:
            continue
        assert value.dtype == given.dtype and tuple(value.shape) == tuple(given.shape), name
        measured[f"d{name}"] = error(value, want)
        assert measured[f"d{name}"] <= factor * bound["grad"], (name, measured)
    return measured


def _like_kind(array: Any, kind: str) -> Any:
    if kind == "numpy":
        return array
    import ml_dtypes

    if kind == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(
    options: dict[str, Any], dtype: str, make_call: Make, backend: Backend, error: Error, bounds: Any
) -> None:
    call = make_call(**{**BASE, "dtype": dtype, **options})
    check(call, backend, error, bounds[dtype])


@pytest.mark.jax_later
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize(
    "options",
    [
        {"T": 70, "HV": 4, "gate": "softplus", "qk_l2norm": True, "beta_sigmoid": True},
        {"lengths": [70, 0, 1, 64], "HV": 4, "checkpoint_every": 64, "state_v_first": True},
        {"op": "chunk_gated_delta_rule", "T": 70, "HV": 4, "gate": "sigmoid", "lower_bound": -5.0},
        {"op": "fused_recurrent_kda", "T": 5, "HV": 4},
    ],
    ids=str,
)
def test_torch_and_jax(
    kind: str, options: dict[str, Any], make_call: Make, backend: Backend, error: Error, bounds: Any
) -> None:
    call = make_call(**{**BASE, **options}).of_kind(kind)
    check(call, backend, error, bounds["float32"])


@pytest.mark.jax_later
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_loses_only_the_rounding_of_results(
    dtype: str, kind: str, make_call: Make, backend: Backend, error: Error, bounds: Any
) -> None:
    call = make_call(T=100, HV=4, dtype=dtype, state_dtype="bfloat16", qk_l2norm=True)
    measured = check(call.of_kind(kind), backend, error, bounds[dtype])
    rounding = {"bfloat16": 2.0e-3, "float16": 2.5e-4}[dtype]
    assert measured["o"] < rounding and measured["dq"] < rounding


HARD = ["slow", "zero", "minus5", "minus60", "mixed"]


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule"])
@pytest.mark.parametrize("gates", HARD)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hard_gates(
    gates: str, op: str, dtype: str, make_call: Make, backend: Backend, error: Error, bounds: Any
) -> None:
    call = make_call(op=op, T=200, H=1, K=32, V=32, gates=gates, dtype=dtype)
    check(call, backend, error, bounds[dtype], factor=2)


@pytest.mark.parametrize("gates", ["slow", "zero", "mixed"])
def test_near_collinear_keys_with_beta_near_one(
    gates: str, make_call: Make, backend: Backend, error: Error, bounds: Any
) -> None:
    call = make_call(T=200, H=1, K=32, V=32, gates=gates, collinear=True, beta_sigmoid=True)
    check(call, backend, error, bounds["float32"], factor=2)


@pytest.mark.parametrize(
    "options, far", [({"gate": "softplus"}, 1.0), ({"gate": "sigmoid", "lower_bound": -5.0}, 10.0)], ids=str
)
def test_gates_from_raw_inputs_of_any_size(
    options: dict[str, Any], far: float, make_call: Make, backend: Backend, error: Error, bounds: Any
) -> None:
    """Raw gates far out on both sides: decays of exactly 1 and of e^-60, or both ends of the
    bounded gate, where its exponential overflows without a warning; and the gradient of A_log."""
    call = make_call(T=150, H=2, K=16, V=16, **options)
    kind = call.rng.random(call.inputs.g.shape)
    raw = np.where(kind < 0.6, np.where(kind < 0.2, 50 * far, -30 * far), call.inputs.g).astype(np.float32)
    check(call.replaced(g=raw), backend, error, bounds["float32"], factor=2)


EDGE = [0, 1, 15, 16, 17, 63, 64, 65, 0]


@pytest.mark.parametrize("options", [{}, {"op": "chunk_gated_delta_rule", "H": 1, "HV": 3}], ids=str)
def test_edge_lengths_in_one_pack(
    options: dict[str, Any], make_call: Make, backend: Backend, error: Error, bounds: Any
) -> None:
    call = make_call(**{"lengths": EDGE, "H": 2, "K": 16, "V": 16, **options})
    check(call, backend, error, bounds["float32"], factor=2)
    out = backend.ops[call.request.op].forward(call.request, call.inputs)
    for empty in (0, 8):
        np.testing.assert_array_equal(out.final_state[empty], call.inputs.initial_state[empty])


@pytest.mark.parametrize("sizes", [(60, 100), (100, 60), (128, 64), (1, 1), (3, 130)], ids=str)
def test_any_head_dims(
    sizes: tuple[int, int], make_call: Make, backend: Backend, error: Error, bounds: Any
) -> None:
    K, V = sizes
    call = make_call(T=80, H=1, HV=2, K=K, V=V)
    check(call, backend, error, bounds["float32"], factor=2)


@pytest.mark.parametrize("lengths", [[0], [0, 0], [1], [5, 3, 64, 1, 1, 70, 2] * 5], ids=str)
def test_packs(lengths: list[int], make_call: Make, backend: Backend, error: Error, bounds: Any) -> None:
    check(make_call(lengths=lengths, H=1, K=8, V=8), backend, error, bounds["float32"])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_contract_size(dtype: str, make_call: Make, backend: Backend, error: Error, bounds: Any) -> None:
    call = make_call(T=2048, H=1, K=128, V=128, dtype=dtype)
    check(call, backend, error, bounds[dtype])


def test_split_equals_whole(make_call: Make, backend: Backend, error: Error) -> None:
    """Prefill in two calls, then a few tokens one by one, equals one call."""
    call = make_call(B=2, T=150, H=2, HV=4, K=16, V=16)
    chunk, decode = backend.ops["chunk_kda"].forward, backend.ops["fused_recurrent_kda"].forward
    whole = chunk(call.request, call.inputs)
    state, parts = call.inputs.initial_state, []
    for start, stop in ((0, 77), (77, 145), *((t, t + 1) for t in range(145, 150))):
        cut = {n: getattr(call.inputs, n)[:, start:stop] for n in ("q", "k", "v", "g", "beta")}
        part = call.replaced({"T": stop - start}, **cut, initial_state=state)
        inputs = part.inputs
        if start >= 145:
            from kdacore.types import RecurrentInputs

            inputs = RecurrentInputs(*inputs[:10])
        out = (decode if start >= 145 else chunk)(part.request, inputs)
        state = out.final_state
        parts.append(out.o)
    assert error(np.concatenate(parts, axis=1), whole.o) < 1e-6
    assert error(state, whole.final_state) < 1e-6


@pytest.mark.parametrize("missing", ["o", "final_state"])
def test_backward_from_nothing_saved_and_with_one_gradient(
    missing: str, make_call: Make, backend: Backend, error: Error
) -> None:
    call = make_call(T=140, H=1, HV=2, needs_grad=True, gates="slow")
    op = backend.ops["chunk_kda"]
    saved = op.forward(call.request, call.inputs).saved
    assert saved
    grads = call.grads()._replace(**{missing: None})
    kept, recomputed = (op.backward(call.request, call.inputs, s, grads) for s in (saved, ()))
    wanted = oracle_backward(call.request, call.inputs, grads)
    for name, want in wanted._asdict().items():
        if want is not None:
            np.testing.assert_array_equal(getattr(kept, name), getattr(recomputed, name))
            assert error(getattr(kept, name), want) < 1e-5, name


def test_no_gradient_at_all_is_zero(make_call: Make, backend: Backend) -> None:
    call = make_call(T=70)
    got = backend.ops["chunk_kda"].backward(call.request, call.inputs, (), OutputGrads(None))
    assert not any(to_float64(g).any() for g in got if g is not None)


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_kinds_agree_with_numpy(kind: str, make_call: Make, backend: Backend, error: Error) -> None:
    """The oracle itself takes any kind."""
    call = make_call(T=20)
    other = call.of_kind(kind)
    np.testing.assert_array_equal(
        oracle_forward(call.request, call.inputs).o, oracle_forward(other.request, other.inputs).o
    )
