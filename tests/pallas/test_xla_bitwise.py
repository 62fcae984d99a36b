"""Bitwise promises of the xla backend, on programs compiled as users run them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import Case, build, full_speed, output_grads, to_jax

from kdacore.types import ChunkInputs, GateInputs, OutputGrads, Request
from kdacore_pallas.xla import chunk_backward, chunk_forward, gate

ROWS = ("q", "k", "v", "g", "beta")
forward = full_speed(chunk_forward.forward)
backward = full_speed(chunk_backward.backward)


def cut(request: Request, inputs: ChunkInputs, T: int) -> tuple[Request, ChunkInputs]:
    """The first T tokens of a dense call."""
    return replace(request, T=T), inputs._replace(**{n: getattr(inputs, n)[:, :T] for n in ROWS})


def run(request: Request, inputs: ChunkInputs, t: int) -> tuple[Any, Any]:
    """o[:t] and the gradients for a loss on ``o[:t]``, the first t rows of those that have rows."""
    arrays = to_jax(inputs)
    out = forward(request, arrays)
    do = np.zeros(out.o.shape, np.float32)
    do[:, :t] = output_grads(replace(request, T=t)).o
    d = backward(request, arrays, out.saved, OutputGrads(jnp.asarray(do, out.o.dtype), None))
    found = {n: np.asarray(x) for n, x in d._asdict().items() if x is not None}
    return np.asarray(out.o[:, :t]), {n: x[:, :t] if n in ROWS else x for n, x in found.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("gates", ["random", "mixed"])
def test_later_tokens_change_no_bit(gates: str) -> None:
    t = 77
    case = Case(T=520, K=16, V=16, H=1, HV=1, gates=gates, final=False, needs_grad=True)
    request, inputs = build(case)
    changed = build(replace(case, seed=9))[1]
    mixed = inputs._replace(
        **{n: np.concatenate([getattr(inputs, n)[:, :t], getattr(changed, n)[:, t:]], 1) for n in ROWS}
    )
    o, d = run(request, inputs, t)
    for other in ((request, mixed), cut(request, inputs, t)):
        o2, d2 = run(*other, t)
        assert np.array_equal(o, o2)
        for name in ROWS:
            assert np.array_equal(d[name], d2[name]), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("T", [64, 100, 128])
def test_gradients_do_not_depend_on_later_tokens(T: int) -> None:
    """Lengths below, at and above one and two segments; gradients of rows and parameters; grouped
    heads."""
    t = 40
    case = Case(
        T=T, B=2, H=2, HV=4, K=64, V=64, gate="softplus", beta_sigmoid=True, final=False, needs_grad=True
    )
    request, inputs = build(case)
    (_, alone), (_, d) = (run(*call, t) for call in (cut(request, inputs, t), (request, inputs)))
    assert alone.keys() == {*ROWS, "A_log", "dt_bias", "initial_state"}
    assert [n for n, x in d.items() if not np.array_equal(x, alone[n])] == []


@pytest.mark.exhaustive
def test_twice_gives_the_same_bits() -> None:
    case = Case(T=200, K=16, V=16, H=1, HV=1, gates="random", final=False, needs_grad=True)
    request, inputs = build(case)
    (o, d), (o2, d2) = (run(request, inputs, 200) for _ in range(2))
    assert np.array_equal(o, o2)
    assert all(np.array_equal(d[n], d2[n]) for n in ROWS)


def test_gate_parameter_gradients_ignore_appended_tokens() -> None:
    """The order of the sum over tokens does not depend on the length of the call."""
    request, whole = build(Case(op="chunk_gated_delta_rule", T=135, gate="softplus"))
    backward_ = full_speed(gate.kda_gate_backward)
    dlog = np.array(whole.g)
    dlog[:, 70:] = 0
    long = backward_(request, GateInputs(whole.g, whole.A_log, whole.dt_bias), dlog)
    cut_ = GateInputs(whole.g[:, :70], whole.A_log, whole.dt_bias)
    short = backward_(replace(request, T=70), cut_, dlog[:, :70])
    assert np.array_equal(long.A_log, short.A_log) and np.array_equal(long.dt_bias, short.dt_bias)
