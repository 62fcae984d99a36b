"""The oracle against two independent answers: torch's autograd over a plain loop, and finite
differences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kdacore.oracle.gate import oracle_gate, oracle_gate_backward
from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_backward, oracle_forward
from kdacore.types import GateInputs, OutputGrads

OPTIONS: list[dict[str, Any]] = [
    {},
    {"HV": 4},
    {"state_v_first": True, "V": 12},
    {"qk_l2norm": True, "beta_sigmoid": True, "neg_eigval": True},
    {"gate": "softplus", "HV": 4},
    {"gate": "sigmoid", "lower_bound": -5.0, "safe_gate": True},
    {"op": "chunk_gated_delta_rule", "HV": 4},
    {"op": "chunk_gated_delta_rule", "gate": "softplus"},
    {"op": "chunk_gated_delta_rule", "gate": "sigmoid", "lower_bound": -2.0},
    {"lengths": [3, 0, 1, 9]},
    {"initial": False},
]


def torch_forward(call: Any, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, one head, one token at a time, straight from the contract."""
    r = call.request
    q, k, v, g, beta = (x[name] for name in ("q", "k", "v", "g", "beta"))
    if r.qk_l2norm:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if r.beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if r.neg_eigval else 1)
    if r.gate != "log":
        a = x["A_log"].exp() if r.scalar_gate else x["A_log"].exp()[:, None]
        y = g + x["dt_bias"]
        if r.gate == "softplus":
            g = -a * torch.nn.functional.softplus(y)
        else:
            g = r.lower_bound * torch.sigmoid(a * y)
    bounds = call.inputs.cu_seqlens
    spans = (
        [(0, int(a), int(b)) for a, b in pairwise(bounds)] if r.packed else [(b, 0, r.T) for b in range(r.B)]
    )
    o = [[[torch.zeros(r.V, dtype=torch.float64)] * r.HV for _ in range(r.T)] for _ in range(r.B)]
    finals = []
    for n, (b, start, end) in enumerate(spans):
        heads = []
        for h in range(r.HV):
            hk = h // (r.HV // r.H)
            S = torch.zeros(r.K, r.V, dtype=torch.float64)
            if "initial_state" in x:
                S = x["initial_state"][n, h].T if r.state_v_first else x["initial_state"][n, h]
            for t in range(start, end):
                decay = g[b, t, h].exp()
                S = (decay if r.scalar_gate else decay[:, None]) * S
                S = S + beta[b, t, h] * torch.outer(k[b, t, hk], v[b, t, h] - k[b, t, hk] @ S)
                o[b][t][h] = r.scale * (q[b, t, hk] @ S)
            heads.append(S.T if r.state_v_first else S)
        finals.append(torch.stack(heads))
    stacked = torch.stack([torch.stack([torch.stack(heads) for heads in row]) for row in o])
    return stacked, torch.stack(finals)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_and_gradients_equal_torch_autograd(
    options: dict[str, Any], make_call: Callable[..., Any], error: Callable[[Any, Any], float]
) -> None:
    call = make_call(**{"T": 13, "H": 2, "K": 6, "V": 5, "dtype": "float64", **options})
    if not call.request.packed:
        call = make_call(**{"B": 2, "T": 7, "K": 6, "V": 5, "dtype": "float64", **options})
    names = [n for n, a in call.inputs._asdict().items() if a is not None and a.dtype.kind == "f"]
    x = {n: torch.tensor(getattr(call.inputs, n), requires_grad=True) for n in names}
    o, final = torch_forward(call, x)
    out = oracle_forward(call.request, call.inputs)
    assert error(out.o, o) < 1e-13
    assert error(out.final_state, final) < 1e-13

    grads = call.grads()
    loss = (o * torch.tensor(grads.o)).sum() + (final * torch.tensor(grads.final_state)).sum()
    loss.backward()
    got = oracle_backward(call.request, call.inputs, grads)
    for name in names:
        assert error(getattr(got, name), x[name].grad) < 1e-12, name
    absent = set(got._fields) - set(names)
    assert all(getattr(got, name) is None for name in absent)


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule"])
def test_gradients_equal_finite_differences(op: str, make_call: Callable[..., Any]) -> None:
    """Over more tokens than one segment of the adjoint keeps."""
    call = make_call(op=op, T=140, H=1, HV=2, K=5, V=4, dtype="float64", gate="softplus", qk_l2norm=True)
    grads = call.grads()

    def loss(inputs: Any) -> float:
        out = oracle_forward(call.request, inputs)
        return float((out.o * grads.o).sum() + (out.final_state * grads.final_state).sum())

    got = oracle_backward(call.request, call.inputs, grads)
    for name, grad in got._asdict().items():
        array = getattr(call.inputs, name)
        direction = call.rng.standard_normal(array.shape)
        eps = 1e-6
        up = loss(call.inputs._replace(**{name: array + eps * direction}))
        down = loss(call.inputs._replace(**{name: array - eps * direction}))
        assert (grad * direction).sum() == pytest.approx((up - down) / (2 * eps), rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("grads", ["o", "final_state"])
def test_either_gradient_may_be_absent(grads: str, make_call: Callable[..., Any]) -> None:
    call = make_call(T=9, K=4, V=3, dtype="float64")
    both = call.grads()
    zero = {"o": both.o, "final_state": both.final_state}
    zero[grads] = np.zeros_like(zero[grads])
    absent = {**zero, grads: None}
    a = oracle_backward(call.request, call.inputs, OutputGrads(**zero))
    b = oracle_backward(call.request, call.inputs, OutputGrads(**absent))
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("gate", ["softplus", "sigmoid"])
def test_gate_is_finite_at_extreme_inputs(gate: str, make_call: Callable[..., Any]) -> None:
    call = make_call(T=4, H=1, K=2, dtype="float64", gate=gate, lower_bound=-5.0)
    g = np.zeros_like(call.inputs.g)
    g[0, :, 0, 0] = [-1e4, 1e4, -60.0, 60.0]
    inputs = GateInputs(g, call.inputs.A_log, np.zeros(2))
    log_decay = oracle_gate(call.request, inputs)
    assert np.isfinite(log_decay).all() and (log_decay <= 0).all()
    grads = oracle_gate_backward(call.request, inputs, np.ones_like(g))
    assert np.isfinite(grads.g).all() and np.isfinite(grads.A_log).all()
    assert grads.dt_bias.shape == (2,), "dt_bias may be flat, and its gradient then is too"


@pytest.mark.parametrize("every", [64, 128])
def test_checkpoints_are_the_states_of_shorter_calls(every: int, make_call: Callable[..., Any]) -> None:
    lengths = [130, 0, 64, 5]
    call = make_call(lengths=lengths, H=1, K=3, V=2, dtype="float64", checkpoint_every=every)
    got = oracle_forward(call.request, call.inputs).checkpoints
    expected = []
    start = 0
    for n, length in enumerate(lengths):
        for stop in range(0, length, every):
            part = {
                name: getattr(call.inputs, name)[:, start : start + stop]
                for name in ("q", "k", "v", "g", "beta")
            }
            short = call.replaced(
                {"packed": False, "N": 1, "T": stop, "checkpoint_every": 0},
                **part,
                cu_seqlens=None,
                initial_state=call.inputs.initial_state[n : n + 1],
            )
            expected.append(oracle_forward(short.request, short.inputs).final_state[0])
        start += length
    np.testing.assert_array_equal(got[: len(expected)], np.stack(expected))
    assert got.shape == call.request.checkpoint_shape and not got[len(expected) :].any()


def test_to_float64_takes_every_kind_and_keeps_every_value(
    rng: np.random.Generator, to_kind: Callable[..., Any]
) -> None:
    import ml_dtypes

    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
        x = rng.standard_normal((3, 4)).astype(dtype)
        for kind in ("numpy", "torch", "jax"):
            got = to_float64(to_kind(x, kind))
            assert got.dtype == np.float64
            np.testing.assert_array_equal(got, x.astype(np.float64))
    leaf = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    np.testing.assert_array_equal(to_float64(leaf), [1.0, 1.0])
