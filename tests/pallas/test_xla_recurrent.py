"""fused_recurrent ops of the xla backend: pools, accepted tokens, packs, read-only; and the gate
op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from pallas_cases import Case, build, check_backward, check_forward, error, output_grads, to_jax

from kdacore.oracle.gate import oracle_gate, oracle_gate_backward
from kdacore.oracle.recurrence import oracle_forward
from kdacore.types import GateInputs, OutputGrads, RecurrentInputs, Request
from kdacore_pallas.xla import entry_points

OP = "fused_recurrent_kda"
RNG = np.random.default_rng(7)

CASES = {
    "dense": Case(op=OP, B=2, T=5, H=2, HV=4, K=24, V=40, gate="softplus", beta_sigmoid=True),
    "no state": Case(
        op=OP, T=3, initial=False, final=False, gate="sigmoid", lower_bound=-5.0, dtype="bfloat16"
    ),
    "pack": Case(op=OP, lengths=(1, 0, 4, 2), v_first=True, gates="mixed"),
    "gdn": Case(op="fused_recurrent_gated_delta_rule", B=2, T=4, gate="softplus", state_dtype="bfloat16"),
}


@pytest.mark.parametrize("name", CASES)
def test_forward(name: str) -> None:
    request, inputs = build(CASES[name])
    check_forward(entry_points.recurrent_forward(request, to_jax(inputs)), request, inputs)


def pooled(case: Case, indices: Any, accepted: Any = None, **options: Any) -> tuple[Request, RecurrentInputs]:
    """A call on a pool of 7 rows."""
    request, inputs = build(case)
    indices = np.asarray(indices, np.int32)
    shape = (7, *request.state_shape[1:])
    pool = RNG.standard_normal(shape).astype(inputs.initial_state.dtype)
    accepted = None if accepted is None else np.asarray(accepted, np.int32)
    inputs = inputs._replace(initial_state=pool, state_indices=indices, num_accepted_tokens=accepted)
    return replace(request, pool_size=7, state_indices_ndim=indices.ndim, **options), inputs


def check_pool(request: Request, inputs: RecurrentInputs) -> None:
    out = entry_points.recurrent_forward(request, to_jax(inputs))
    want = oracle_forward(request, inputs)
    assert error(out.o, want.o) < 2e-5
    assert error(out.final_state, want.final_state) < 2e-5
    named = set(np.asarray(inputs.state_indices).ravel().tolist())
    for row in set(range(7)) - named:
        assert np.array_equal(np.asarray(out.final_state[row]), inputs.initial_state[row])


def test_pool_in_place_with_an_empty_slot() -> None:
    case = Case(op=OP, B=3, T=2, v_first=True)
    check_pool(*pooled(case, [4, -1, 0], inplace_state=True))


def test_pool_not_in_place_returns_fresh_states() -> None:
    request, inputs = pooled(Case(op=OP, B=3, T=2), [4, -1, 0])
    check_forward(entry_points.recurrent_forward(request, to_jax(inputs)), request, inputs)


def test_accepted_tokens_continue_and_store_every_state() -> None:
    table = [[0, 1, 2], [3, 4, -1], [5, 6, -1]]
    request, inputs = pooled(Case(op=OP, B=3, T=2), table, [2, 0, 1], inplace_state=True)
    check_pool(request, inputs)


def test_accepted_tokens_in_a_pack() -> None:
    table = [[0, 1, 2], [3, -1, -1], [5, 6, -1]]
    request, inputs = pooled(Case(op=OP, lengths=(3, 1, 2)), table, [1, 1, 2], inplace_state=True)
    check_pool(request, inputs)


def test_in_place_without_indices() -> None:
    request, inputs = build(Case(op=OP, B=2, T=3))
    request = replace(request, inplace_state=True)
    out = entry_points.recurrent_forward(request, to_jax(inputs))
    assert error(out.final_state, oracle_forward(request, inputs).final_state) < 2e-5


def test_read_only() -> None:
    request, inputs = pooled(Case(op=OP, B=2, T=4, final=False), [5, 2], read_only_state=True)
    out = entry_points.recurrent_forward(request, to_jax(inputs))
    assert out.final_state is None
    assert error(out.o, oracle_forward(request, inputs).o) < 2e-5


def test_backward() -> None:
    request, inputs = build(Case(op=OP, B=2, T=6, gate="softplus"))
    grads = output_grads(request)
    d = OutputGrads(*(jnp.asarray(x) for x in grads))
    check_backward(entry_points.recurrent_backward(request, to_jax(inputs), (), d), request, inputs, grads)


@pytest.mark.parametrize("gate", ["softplus", "sigmoid"])
@pytest.mark.parametrize("scalar", [False, True], ids=["", "scalar"])
def test_gate_op(gate: str, scalar: bool) -> None:
    op = "chunk_gated_delta_rule" if scalar else "chunk_kda"
    request, whole = build(Case(op=op, B=2, T=9, gate=gate, lower_bound=-3.0 if gate == "sigmoid" else None))
    inputs = GateInputs(whole.g, whole.A_log, whole.dt_bias)
    log = entry_points.gate_forward(request, to_jax(inputs))
    assert log.dtype == jnp.float32
    assert error(log, oracle_gate(request, inputs)) < 2e-6
    dlog = RNG.standard_normal(log.shape).astype(np.float32)
    got = entry_points.gate_backward(request, to_jax(inputs), jnp.asarray(dlog))
    for x, ref in zip(got, oracle_gate_backward(request, inputs, dlog), strict=True):
        assert error(x, ref) < 5e-6
