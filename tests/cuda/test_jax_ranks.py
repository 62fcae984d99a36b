"""``cp=`` from JAX on the emulated kernels: each slice composed of whole calls, the ranks those of a mapped axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import MODEL, O_BOUND, STATE_BOUND, Draw, error
from emulated_backend import NAME
from jax_emulation import Device, to_jax

import kdacore

RANKS, T, H, K = 2, 40, 1, 128
TOKENS = ("q", "k", "v", "g", "beta")
GRADIENT_BOUND = 8e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("offsets", [None, (0, 30, 30, 70, 80)])
def test_slices_are_those_of_the_row(
    emulated: list[str], from_jax: Device, offsets: tuple[int, ...] | None
) -> None:
    """Results, states and gradients, against plain JAX on the whole row. The pack has an empty sequence."""
    d = Draw(0)
    x = {n: d.normal(1, RANKS * T, H, K) for n in "qkv"}
    x |= {"beta": d.normal(1, RANKS * T, H), **d.gate("random", 1, RANKS * T, H, K)}
    x = {n: to_jax(a) for n, a in x.items()}
    given = {} if offsets is None else {"cu_seqlens": jnp.array(offsets, jnp.int32)}
    x["initial_state"] = jnp.asarray(
        np.random.default_rng(3).normal(size=(len(offsets or "ab") - 1, H, K, K)), "float32"
    )

    def call(x: dict[str, Any], **how: Any) -> Any:
        return kdacore.chunk_kda(**x, **given, **MODEL, output_final_state=True, **how)

    def loss(results: Any) -> Any:
        o, states = results
        return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.cos(states))

    def whole(x: dict[str, Any]) -> Any:
        return loss(call(x, backend="xla"))

    def split(x: dict[str, Any]) -> Any:
        cut = {n: jnp.stack(jnp.split(x[n], RANKS, axis=1)) for n in TOKENS}
        shared = {n: a for n, a in x.items() if n not in TOKENS}
        o, states = jax.vmap(lambda y: call({**y, **shared}, cp="seq", backend=NAME), axis_name="seq")(cut)
        return jnp.concatenate([*o], axis=1), states[0]

    with kdacore.record_selections() as ran:
        results = jax.jit(split)(x)
    assert {s.backend for s in ran} == {NAME}
    wanted = call(x, backend="xla")
    for got, want, bound in zip(results, wanted, (O_BOUND, STATE_BOUND), strict=True):
        assert error(np.asarray(got, np.float32), np.asarray(want, np.float32)) < 2 * bound
    gradients = jax.jit(jax.grad(lambda x: loss(split(x))))(x)
    for name, want in jax.jit(jax.grad(whole))(x).items():
        assert (
            error(np.asarray(gradients[name], np.float32), np.asarray(want, np.float32)) < 2 * GRADIENT_BOUND
        ), name
