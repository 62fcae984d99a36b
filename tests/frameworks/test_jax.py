"""The JAX join: jit, grad, vmap, checkpoint and shard_map through custom_vjp; clear refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kdacore
from kdacore.arrays import jax as jax_arrays
from kdacore.calls.values import Shape, normalise, offsets, tensors, to_kind
from kdacore.errors import ContractError

SHAPE = Shape(B=2, T=70, H=1, HV=2, K=8, V=8)


def call(seed: int = 0, shape: Shape = SHAPE) -> dict[str, Any]:
    return {n: to_kind(a, "jax", "float32") for n, a in normalise(tensors(shape, seed)).items()}


def expected(x: dict[str, Any], **options: Any) -> Any:
    """The reference on NumPy: eager JAX would compile every primitive of it."""
    host = {n: np.asarray(a) for n, a in x.items()}
    return kdacore.chunk_kda(**host, **options, backend="reference")


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-5)


def test_what_is_no_array_of_numbers_is_named() -> None:
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in call().items()}
    assert kdacore.explain("chunk_kda", **shapes).backend
    with pytest.raises(ContractError, match="'q'.*ShapeDtypeStruct.*explain"):
        kdacore.chunk_kda(**shapes)
    keys = jax.random.split(jax.random.key(0), call()["beta"].shape)
    with pytest.raises(ContractError, match="'beta'.*key<"):
        kdacore.chunk_kda(**call() | {"beta": keys})


class Parameter:
    """As flax's: no array, but JAX takes the array that it stands for."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __jax_array__(self) -> Any:
        return self.value


@pytest.mark.exhaustive
def test_objects_that_stand_for_arrays() -> None:
    x = call()
    A_log = jnp.zeros(2)
    gated = {"use_gate_in_kernel": True, "backend": "xla"}
    want = kdacore.fused_recurrent_kda(**x, A_log=A_log, **gated)[0]
    for given in ({"A_log": Parameter(A_log)}, {"q": Parameter(x["q"]), "A_log": A_log}):
        got = kdacore.fused_recurrent_kda(**{**x, **given}, **gated)[0]
        assert jnp.array_equal(got, want)
        assert kdacore.explain("fused_recurrent_kda", **{**x, **given}, **gated).backend == "xla"
        assert kdacore.selection_of("fused_recurrent_kda", **{**x, **given}, **gated).backend == "xla"

    def loss(A_log: Any, wrap: Any) -> Any:
        return kdacore.fused_recurrent_kda(**x, A_log=wrap(A_log), **gated)[0].sum()

    one, two = (jax.jit(jax.grad(lambda a, w=w: loss(a, w)))(A_log) for w in (Parameter, jnp.asarray))
    assert one.any() and jnp.array_equal(one, two)


def test_what_such_an_object_stands_for_is_checked() -> None:
    x = call()
    with pytest.raises(ContractError, match="'beta'.*shape"):
        kdacore.chunk_kda(**x | {"beta": Parameter(x["beta"][:, 1:])})
    with pytest.raises(ContractError, match="'k'.*jax array.*numpy"):
        kdacore.chunk_kda(**{n: np.asarray(a) for n, a in x.items()} | {"k": Parameter(x["k"])})


@pytest.mark.slow
def test_eager_calls_take_any_capable_backend() -> None:
    for backend in ("reference", "xla"):
        with kdacore.record_selections() as ran:
            o, state = kdacore.chunk_kda(**call(), output_final_state=True, backend=backend)
        assert [s.backend for s in ran] == [backend]
        close(o, expected(call())[0])
        assert state.shape == (2, 2, 8, 8)


@pytest.mark.slow
def test_arrays_with_values_inside_a_trace() -> None:
    """A backend that cannot be traced runs at once, and what it returns has values."""
    x, offset = call(), jnp.ones(())

    def run(offset: Any) -> Any:
        o = kdacore.chunk_kda(**x, backend="reference")[0]
        assert not isinstance(o, jax.core.Tracer)
        return o, o + offset

    o, moved = jax.jit(run)(offset)
    assert jnp.array_equal(o, kdacore.chunk_kda(**x, backend="reference")[0])
    close(moved, expected(x)[0] + 1)


def test_jit() -> None:
    with kdacore.record_selections() as ran:
        o, state = jax.jit(lambda x: kdacore.chunk_kda(**x, output_final_state=True))(call())
    assert [s.backend for s in ran] == ["xla"]
    for ours, theirs in zip((o, state), expected(call(), output_final_state=True), strict=True):
        close(ours, theirs)


@pytest.mark.exhaustive
def test_an_eager_grad_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It traces each time: with a function made for each trace, each would compile."""
    made = []
    join = jax_arrays._join_whole
    monkeypatch.setattr(jax_arrays, "_join_whole", lambda plan: made.append(plan) or join(plan))
    x = call(shape=Shape(B=1, T=3, H=1, HV=1, K=8, V=8))

    def grad(seed: int, scale: float) -> Any:
        def loss(v: Any) -> Any:
            return kdacore.chunk_kda(**{**x, "v": v}, scale=scale)[0].sum()

        return jax.grad(loss)(x["v"] + seed)

    one, two = grad(0, 0.37), grad(1, 0.37)
    assert len(made) == 1
    close(one, two)  # o is linear in v
    close(2 * one, grad(0, 0.74))
    assert len(made) == 2


@pytest.mark.first_cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("function", [kdacore.chunk_kda, kdacore.fused_recurrent_kda])
def test_grad_matches_torch_on_the_reference(function: Any) -> None:
    import torch

    x = call()
    x["initial_state"] = jnp.ones((2, 2, 8, 8))

    def loss(x: Any) -> Any:
        o, state = function(**x, output_final_state=True)
        return jnp.sum(jnp.sin(o)) + jnp.sum(state**2)

    got = jax.jit(jax.grad(loss))(x)
    theirs = {n: torch.from_numpy(np.array(a)).requires_grad_() for n, a in x.items()}
    o, state = function(**theirs, output_final_state=True, backend="reference")
    (o.sin().sum() + (state**2).sum()).backward()
    for name, a in theirs.items():
        close(got[name], a.grad)


def test_the_gate_and_its_gradient() -> None:
    g, A_log = jnp.linspace(-2, 2, 48).reshape(1, 3, 2, 8), jnp.array([0.1, -0.3])

    def loss(g: Any, A_log: Any) -> Any:
        return jnp.sum(kdacore.kda_gate(g, A_log=A_log) ** 2)

    def plain(g: Any, A_log: Any) -> Any:
        return jnp.sum((-jnp.exp(A_log)[:, None] * jax.nn.softplus(g)) ** 2)

    for a, b in zip(jax.grad(loss, (0, 1))(g, A_log), jax.grad(plain, (0, 1))(g, A_log), strict=True):
        close(a, b)


@pytest.mark.slow
def test_packed_offsets_may_be_traced() -> None:
    x = {n: a[:1] for n, a in call().items()}

    def run(x: Any, cu: Any) -> Any:
        return kdacore.chunk_kda(**x, cu_seqlens=cu, output_final_state=True)

    function = jax.jit(run)
    for lengths in ((70, 0, 0), (3, 0, 67), (1, 64, 5)):
        cu = jnp.asarray(offsets(lengths), dtype=jnp.int32)
        theirs = expected(x, cu_seqlens=offsets(lengths), output_final_state=True)
        for a, b in zip(function(x, cu), theirs, strict=True):
            close(a, b)
    grads = jax.jit(jax.grad(lambda x: jnp.sum(run(x, cu)[0])))(x)
    assert all(bool(jnp.isfinite(a).all()) for a in grads.values())


@pytest.mark.exhaustive
def test_vmap_and_checkpoint() -> None:
    xs = jax.tree.map(lambda *a: jnp.stack(a), call(0), call(1))
    mapped = jax.vmap(lambda x: kdacore.chunk_kda(**x)[0])(xs)
    for i in range(2):
        close(mapped[i], expected(call(i))[0])

    def loss(x: Any) -> Any:
        return jnp.sum(kdacore.chunk_kda(**x)[0] ** 2)

    for a, b in zip(
        jax.grad(jax.checkpoint(loss))(call()).values(), jax.grad(loss)(call()).values(), strict=True
    ):
        close(a, b)


def test_contract_errors_come_at_trace_time() -> None:
    x = call()
    x["beta"] = x["beta"][:, :-1]
    with pytest.raises(kdacore.ContractError, match="'beta'"):
        jax.jit(lambda x: kdacore.chunk_kda(**x)[0])(x)


def test_forcing_a_backend_that_cannot_be_traced() -> None:
    with pytest.raises(kdacore.UnsupportedError, match="trac"):
        jax.jit(lambda x: kdacore.chunk_kda(**x, backend="reference")[0])(call())


def test_when_nothing_can_serve_a_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the reference alone: the error says that tracing is the obstacle."""
    from kdacore.dispatch import plan
    from kdacore.registry import REGISTRY

    only = {"reference": REGISTRY.backends()["reference"]}
    monkeypatch.setattr(REGISTRY, "_backends", only)
    plan.clear()
    with pytest.raises(kdacore.UnsupportedError, match=r"(?s)no backend can serve.*\[traced\]"):
        jax.jit(lambda x: kdacore.chunk_kda(**x, scale=0.125)[0])(call())


@pytest.mark.parametrize("axis", [0, 1])
def test_symbolic_sizes(axis: int) -> None:
    """Of batch and tokens the recurrent op alone takes them; of heads and channels none does."""
    n, h = jax.export.symbolic_shape("n, h")

    def specs(axis: int, size: Any) -> dict[str, Any]:
        of = {name: (*a.shape[:axis], size, *a.shape[axis + 1 :]) for name, a in call().items()}
        return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in of.items()}

    def chunk(x: Any) -> Any:
        return kdacore.chunk_kda(**x)[0]

    def recurrent(x: Any) -> Any:
        return kdacore.fused_recurrent_kda(**x)[0]

    exported = jax.export.export(jax.jit(recurrent))(specs(axis, n))
    assert exported.out_avals[0].shape[axis] == n
    for function, x in ((chunk, specs(axis, n)), (recurrent, specs(2, h))):
        with pytest.raises(ContractError, match="'q'.*symbolic sizes.*known while tracing"):
            jax.export.export(jax.jit(function))(x)
    with pytest.raises(ContractError, match="'q'.*symbolic sizes"):
        kdacore.explain("chunk_kda", **specs(axis, n))


def test_explain_takes_shape_structs() -> None:
    x = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in call().items()}
    assert kdacore.explain("chunk_kda", **x).backend in ("xla", "reference")


def test_pools_and_stages_may_be_traced() -> None:
    x = {n: a[:, :1] for n, a in call().items()}
    pool, rows = jnp.ones((5, 2, 8, 8)), jnp.array([3, -1])

    def step(x: Any, pool: Any) -> Any:
        options = {"state_indices": rows, "inplace_state": True, "output_final_state": True}
        return kdacore.fused_recurrent_kda(**x, initial_state=pool, **options)

    o, new = jax.jit(step)(x, pool)
    assert o.shape == (2, 1, 2, 8)
    assert [bool((new[i] != 1).any()) for i in range(5)] == [False, False, False, True, False]
    gc = jax.jit(lambda g: kdacore.stages.kda_chunk_gate(g))(x["g"])
    close(gc, np.asarray(x["g"]) / np.log(2))
