"""Calls of the xla backend under plain ``jit`` with split arrays, on fake devices, against the oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pallas_cases import Case, build, check_backward, check_forward, error, output_grads, to_jax
from split_arrays import BOTH, HEADS, Layout, collectives, mesh, on_mesh

import kdacore
from kdacore.types import ChunkInputs, Device, InputGrads, OutputGrads, Outputs
from kdacore_pallas.xla import entry_points


def forward_and_backward(case: Case, layout: Layout) -> Counter[str]:
    """Check a call with its gradients. Returns the collectives of its program."""
    request, inputs = build(case)
    request = replace(request, needs_grad=True)
    recurrent = "recurrent" in case.op
    forward = entry_points.recurrent_forward if recurrent else entry_points.chunk_forward
    backward = entry_points.recurrent_backward if recurrent else entry_points.chunk_backward
    grads = output_grads(request)
    x, d = layout.place(inputs, grads)

    @jax.jit
    def both(x: dict[str, Any], d: Any) -> Any:
        given = type(inputs)(**x)
        out = forward(request, given)
        return out[:2], backward(request, given, out.saved, d)

    program = both.lower(x, d).compile()
    (o, final), found = program(x, d)
    assert o.sharding.spec == layout.tokens and found.v.sharding.spec == layout.tokens
    check_forward(Outputs(o, final), request, inputs)
    check_backward(InputGrads(*found), request, inputs, grads)
    return collectives(program)


GRADIENTS = Case(B=2, T=70, H=4, HV=8, K=8, V=16, gate="softplus")
SPLIT_BOTH, SPLIT_HEADS = Layout(BOTH, P("data", "heads")), Layout(HEADS, P(None, "heads"))


def test_batch_and_heads() -> None:
    """Grouped value heads. The one sum is that of the gradients that sequences share."""
    assert forward_and_backward(GRADIENTS, SPLIT_BOTH) == {"all-reduce": 1}


@pytest.mark.exhaustive
def test_a_pack_over_heads() -> None:
    assert not forward_and_backward(replace(GRADIENTS, B=1, lengths=(3, 0, 70), v_first=True), SPLIT_HEADS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changed",
    [
        {"HV": 4, "op": "chunk_gated_delta_rule", "v_first": True},
        {"op": "chunk_gated_delta_rule", "gate": "log"},
        {"HV": 4, "gate": "sigmoid", "lower_bound": -5.0},
        {"op": "fused_recurrent_kda", "T": 5},
        {"op": "fused_recurrent_gated_delta_rule", "B": 1, "lengths": (2, 0, 3)},
    ],
    ids=str,
)
def test_heads_alone(changed: dict[str, Any]) -> None:
    assert not forward_and_backward(replace(GRADIENTS, **changed), SPLIT_HEADS)


@pytest.mark.parametrize("device", [Device("tpu", arch="v6e"), Device("cuda", 0, "sm_90")], ids=str)
def test_the_programs_for_other_devices(device: Device) -> None:
    """They have arrays of constants in them, for which JAX's partitioned functions have no place."""
    request, inputs = build(replace(GRADIENTS, dtype="bfloat16", K=16))
    request = replace(request, device=device)
    x = {n: on_mesh(a, SPLIT_BOTH.of(n)) for n, a in inputs._asdict().items() if a is not None}
    program = jax.jit(lambda x: entry_points.chunk_forward(request, ChunkInputs(**x))[:2]).lower(x).compile()
    assert not collectives(program)
    check_forward(Outputs(*program(x)), request, inputs)


@pytest.mark.exhaustive
def test_the_public_call_and_its_gradients() -> None:
    """``jax.grad`` of a model's loss, parameters split with the heads."""
    inputs = build(replace(GRADIENTS, B=4, initial=False))[1]
    x = {
        n: on_mesh(getattr(inputs, n), SPLIT_BOTH.of(n))
        for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    }

    def loss(x: dict[str, Any]) -> Any:
        options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "backend": "xla"}
        return jnp.sum(jnp.sin(kdacore.chunk_kda(**x, **options)[0]))

    program = jax.jit(jax.grad(loss)).lower(x).compile()
    assert set(collectives(program)) == {"all-reduce"}
    want = jax.grad(loss)({n: jnp.asarray(np.asarray(a)) for n, a in x.items()})
    for name, got in program(x).items():
        assert error(got, want[name]) < 2e-5, name


@pytest.mark.exhaustive
def test_what_cannot_be_split_is_gathered() -> None:
    """Tokens, channels, and six heads over four devices."""
    request, inputs = build(Case(B=2, T=70, H=6, HV=6, K=8, V=8))
    for spec in (P(None, "data"), HEADS, P(None, None, None, "heads")):
        x = to_jax(inputs)

        @jax.jit
        def run(x: ChunkInputs, spec: P = spec) -> Any:
            hint = NamedSharding(mesh(), spec)
            q, k = (jax.lax.with_sharding_constraint(a, hint) for a in (x.q, x.k))
            return entry_points.chunk_forward(request, x._replace(q=q, k=k))[:2]

        check_forward(Outputs(*run(x)), request, inputs)


def test_a_backward_split_in_another_way_than_its_forward() -> None:
    """What the forward saves has the layout of the whole call, so it must not be read."""
    request, inputs = build(replace(GRADIENTS, needs_grad=True))
    grads = output_grads(request)
    x = {n: on_mesh(a, SPLIT_HEADS.of(n)) for n, a in inputs._asdict().items() if a is not None}
    other = {n: on_mesh(a, P("data") if n in "qkvg" or n == "beta" else P()) for n, a in x.items()}
    saved = jax.jit(lambda x: entry_points.chunk_forward(request, ChunkInputs(**x)).saved)(x)
    d = OutputGrads(*(on_mesh(a, P()) for a in grads))
    found = jax.jit(lambda x, s, d: entry_points.chunk_backward(request, ChunkInputs(**x), s, d))(
        other, saved, d
    )
    check_backward(InputGrads(*found), request, inputs, grads)


@pytest.mark.exhaustive
def test_decoding_from_a_pool() -> None:
    """Heads split, the pool with them; sequences find their rows by number, so the batch is not."""
    case = Case(B=2, T=1, H=4, HV=4, K=8, V=8, op="fused_recurrent_kda", initial=False)
    inputs = build(case)[1]
    x = {n: jnp.asarray(getattr(inputs, n)) for n in ("q", "k", "v", "g", "beta")}
    pool, rows = jax.random.normal(jax.random.key(0), (5, 4, 8, 8)), jnp.array([3, -1])

    def step(x: dict[str, Any], pool: Any, op: Any) -> Any:
        options = {"state_indices": rows, "inplace_state": True, "output_final_state": True}
        return op(**x, initial_state=pool, **options, backend="xla")

    split = {n: on_mesh(a, HEADS) for n, a in x.items()}
    for op in (kdacore.fused_recurrent_kda, kdacore.chunk_kda):
        run = jax.jit(lambda x, pool, op=op: step(x, pool, op))
        program = run.lower(split, on_mesh(pool, P(None, "heads"))).compile()
        assert not collectives(program)
        for got, want in zip(program(split, on_mesh(pool, P(None, "heads"))), step(x, pool, op), strict=True):
            assert error(got, want) < 1e-5


@pytest.mark.exhaustive
def test_vmap_and_remat_of_split_arrays() -> None:
    inputs = build(Case(B=4, T=24, H=2, HV=2, K=8, V=8, initial=False))[1]
    x = {n: on_mesh(a, P("data")) for n, a in inputs._asdict().items() if a is not None}

    def loss(x: dict[str, Any]) -> Any:
        return jnp.sum(jnp.sin(kdacore.chunk_kda(**x, use_qk_l2norm_in_kernel=True, backend="xla")[0]))

    def mapped(x: dict[str, Any]) -> Any:
        return jnp.sum(jax.vmap(lambda row: loss({n: a[None] for n, a in row.items()}))(x))

    want = jax.grad(loss)({n: jnp.asarray(np.asarray(a)) for n, a in x.items()})
    for function in (mapped, jax.checkpoint(loss)):
        got = jax.jit(jax.grad(function))(x)
        for name, a in got.items():
            assert error(a, want[name]) < 5e-5, name
