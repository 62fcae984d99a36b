"""Calls of the TPU kernels under plain ``jit`` with split arrays, interpreted on fake devices, against the oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pallas_cases import Case, build, check_backward, check_forward, error, output_grads
from split_arrays import BOTH, HEADS, Layout, collectives, mesh, on_mesh

import kdacore
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs
from kdacore_pallas.tpu import entry_points


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDACORE_PALLAS_INTERPRET", "1")
    kdacore.config.refresh()


def forward_and_backward(case: Case, layout: Layout) -> Counter[str]:
    """Check a call with its gradients. Returns the collectives of its program."""
    request, inputs = build(case)
    request = replace(request, needs_grad=True)
    grads = output_grads(request)
    x, d = layout.place(inputs, grads)

    @jax.jit
    def both(x: dict[str, Any], d: Any) -> Any:
        given = ChunkInputs(**x)
        out = entry_points.chunk_forward(request, given)
        return out[:2], entry_points.chunk_backward(request, given, (), d)

    program = both.lower(x, d).compile()
    (o, final), found = program(x, d)
    assert o.sharding.spec == layout.tokens and found.v.sharding.spec == layout.tokens
    check_forward(Outputs(o, final), request, inputs)
    check_backward(InputGrads(*found), request, inputs, grads)
    return collectives(program)


GRADIENTS = Case(B=2, T=40, H=4, HV=8, K=8, V=16, gate="softplus")


@pytest.mark.exhaustive
def test_batch_and_heads() -> None:
    """Grouped value heads. The one sum is that of the gradients that sequences share."""
    assert forward_and_backward(GRADIENTS, Layout(BOTH, P("data", "heads"))) == {"all-reduce": 1}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changed",
    [
        {"B": 1, "lengths": (3, 0, 20), "HV": 4},
        {"B": 1, "lengths": (3, 0, 20), "op": "chunk_gated_delta_rule", "v_first": True},
        {"op": "chunk_gated_delta_rule", "gate": "log"},
        {"initial": False, "HV": 4, "gate": "sigmoid", "lower_bound": -5.0},
    ],
    ids=str,
)
def test_heads_alone(changed: dict[str, Any]) -> None:
    assert not forward_and_backward(replace(GRADIENTS, **changed), Layout(HEADS, P(None, "heads")))


@pytest.mark.exhaustive
def test_what_cannot_be_split_is_gathered() -> None:
    """Six heads over four devices, and channels."""
    case = Case(B=2, T=24, H=6, HV=6, K=8, V=8)
    request, inputs = build(case)
    for spec in (HEADS, P(None, None, None, "heads")):
        x = {n: on_mesh(a, P()) for n, a in inputs._asdict().items() if a is not None}

        @jax.jit
        def run(x: dict[str, Any], spec: P = spec) -> Any:
            hint = NamedSharding(mesh(), spec)
            x |= {n: jax.lax.with_sharding_constraint(x[n], hint) for n in "qk"}
            return entry_points.chunk_forward(request, ChunkInputs(**x))[:2]

        check_forward(Outputs(*run(x)), request, inputs)


def test_rows_split_along_their_tokens_are_refused() -> None:
    request, inputs = build(Case(B=2, T=24, H=4, HV=4, K=8, V=8))
    x = {
        n: on_mesh(a, P(None, "data") if n in "qkvg" else P())
        for n, a in inputs._asdict().items()
        if a is not None
    }
    run = jax.jit(lambda x: entry_points.chunk_forward(request, ChunkInputs(**x))[:2])
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match="argument 'q'.*along its tokens.*'data'.*with_sharding_constraint.*shard_map, cp=",
    ):
        run.lower(x).compile()


def test_arrays_without_a_sharding_in_a_program_for_several_devices() -> None:
    """JAX knows no mesh for them inside set_mesh of one with Explicit axes: every device computes the whole call."""
    request, inputs = build(Case(B=2, T=24, H=4, HV=4, K=8, V=8))
    x = {n: jnp.asarray(a) for n, a in inputs._asdict().items() if a is not None}
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        out = jax.jit(lambda x: entry_points.chunk_forward(request, ChunkInputs(**x))[:2])(x)
    check_forward(Outputs(*out), request, inputs)


@pytest.mark.exhaustive
def test_results_may_be_split_along_their_tokens() -> None:
    """And the gradients that come back to them: that is no reason to split the arguments, nor to refuse them. An axis
    of one device splits nothing."""
    case = Case(B=2, T=24, H=4, HV=4, K=8, V=8)
    request, inputs = build(case)
    request = replace(request, needs_grad=True)
    grads = output_grads(request)
    along = NamedSharding(mesh(), P(None, "data"))
    x = {n: on_mesh(a, P()) for n, a in inputs._asdict().items() if a is not None}

    @jax.jit
    def both(x: dict[str, Any], d: Any) -> Any:
        given = ChunkInputs(**x | {n: x[n] + 0 for n in "qkvg"})  # XLA decides how these are split
        out = entry_points.chunk_forward(request, given)
        found = entry_points.chunk_backward(request, given, (), d)
        return (jax.lax.with_sharding_constraint(out.o, along), out.final_state), found

    (o, final), found = both(
        x, OutputGrads(on_mesh(grads.o, P(None, "data")), on_mesh(grads.final_state, P()))
    )
    assert o.sharding.spec == P(None, "data")
    check_forward(Outputs(o, final), request, inputs)
    check_backward(InputGrads(*found), request, inputs, grads)

    one = Mesh(np.asarray(jax.devices()[:2]).reshape(2, 1), ("data", "tokens"))
    placed = NamedSharding(one, P("data", "tokens"))
    split = {
        n: jax.device_put(a, placed if n in ("q", "k", "v", "g", "beta") else NamedSharding(one, P()))
        for n, a in x.items()
    }
    out = jax.jit(lambda x: entry_points.chunk_forward(request, ChunkInputs(**x))[:2])(split)
    check_forward(Outputs(*out), request, inputs)


@pytest.mark.exhaustive
def test_decoding_from_a_pool() -> None:
    """Heads split, the pool with them; sequences find their rows by number, so the batch is not."""
    case = Case(B=2, T=1, H=4, HV=4, K=8, V=8, op="fused_recurrent_kda", initial=False)
    _, inputs = build(case)
    x = {n: jnp.asarray(getattr(inputs, n)) for n in ("q", "k", "v", "g", "beta")}
    pool, rows = jax.random.normal(jax.random.key(0), (5, 4, 8, 8)), jnp.array([3, -1])

    def step(x: dict[str, Any], pool: Any, backend: str) -> Any:
        options = {"state_indices": rows, "inplace_state": True, "output_final_state": True}
        return kdacore.fused_recurrent_kda(**x, initial_state=pool, **options, backend=backend)

    split = {n: on_mesh(a, HEADS) for n, a in x.items()}
    program = (
        jax.jit(lambda x, pool: step(x, pool, "pallas"))
        .lower(split, on_mesh(pool, P(None, "heads")))
        .compile()
    )
    assert not collectives(program)
    for got, want in zip(program(split, on_mesh(pool, P(None, "heads"))), step(x, pool, "xla"), strict=True):
        assert error(got, want) < 1e-5


@pytest.mark.exhaustive
def test_vmap_and_remat() -> None:
    """A partitioned operation has no rule of its own for either."""
    case = Case(B=2, T=24, H=2, HV=2, K=8, V=8, initial=False)
    x = {n: a for n, a in build(case)[1]._asdict().items() if a is not None}

    def loss(x: dict[str, Any], backend: str) -> Any:
        return jnp.sum(jnp.sin(kdacore.chunk_kda(**x, use_qk_l2norm_in_kernel=True, backend=backend)[0]))

    def each(row: dict[str, Any], backend: str) -> Any:
        return loss({n: a[None] for n, a in row.items()}, backend)

    def mapped(x: dict[str, Any], backend: str) -> Any:
        return jnp.sum(jax.vmap(lambda row: each(row, backend))(x))

    want = jax.jit(jax.grad(lambda x: loss(x, "xla")))(x)
    for function in (mapped, jax.checkpoint(loss, static_argnums=1)):
        got = jax.jit(jax.grad(lambda x, f=function: f(x, "pallas")))(x)
        for name, a in got.items():
            assert error(a, want[name]) < 5e-5, name
