"""``cp=`` from JAX on the emulated kernels for slices, the ranks those of a mapped axis."""

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
@pytest.mark.parametrize(
    ("op", "first"), [("chunk_kda", "prepare"), ("chunk_gated_delta_rule", "chunk_records")]
)
def test_slices_are_those_of_the_row(
    emulated: list[str], from_jax: Device, op: str, first: str, offsets: tuple[int, ...] | None
) -> None:
    """Results, states and gradients, against plain JAX on the whole row. The pack has an empty sequence."""
    d = Draw(0)
    x = {n: d.normal(1, RANKS * T, H, K) for n in "qkv"}
    x |= {"beta": d.normal(1, RANKS * T, H), **d.gate("random", 1, RANKS * T, H, K)}
    if op == "chunk_gated_delta_rule":
        x |= {n: x[n][..., 0] for n in ("g", "dt_bias")}
    x = {n: to_jax(a) for n, a in x.items()}
    given = {} if offsets is None else {"cu_seqlens": jnp.array(offsets, jnp.int32)}
    x["initial_state"] = jnp.asarray(
        np.random.default_rng(3).normal(size=(len(offsets or "ab") - 1, H, K, K)), "float32"
    )

    def call(x: dict[str, Any], **how: Any) -> Any:
        return getattr(kdacore, op)(**x, **given, **MODEL, output_final_state=True, **how)

    def loss(results: Any) -> Any:
        o, states = results
        return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.cos(states))

    def rank(mine: dict[str, Any], shared: dict[str, Any], d: Any) -> Any:
        results, vjp = jax.vjp(lambda x: call(x, cp="seq", backend=NAME), {**mine, **shared})
        # Final states are the same on all ranks: the gradients of their copies are added up.
        return results, vjp((d[0], d[1] / RANKS))[0]

    def cut(a: Any) -> Any:
        return jnp.stack(jnp.split(a, RANKS, axis=1))

    wanted, vjp = jax.vjp(lambda x: call(x, backend="xla"), x)
    d = jax.grad(loss)(wanted)
    mine, shared = {n: cut(x[n]) for n in TOKENS}, {n: a for n, a in x.items() if n not in TOKENS}
    ranks = jax.vmap(rank, in_axes=(0, None, (0, None)), axis_name="seq")
    with kdacore.record_selections() as ran:
        (o, states), found = jax.block_until_ready(jax.jit(ranks)(mine, shared, (cut(d[0]), d[1])))
    assert {s.backend for s in ran} == {NAME}
    names = [x.kernel.name.split("-")[0] for x in from_jax.launched]
    for name in ("transition", "slice_gradient"):  # nothing is composed of whole calls
        assert names.count(name) == RANKS
    assert names.count(first) == 2 * RANKS and not {"chunk_forward", "walk_records"} & {*names}
    for got, want, bound in ((joined(o), wanted[0], O_BOUND), (states[0], wanted[1], STATE_BOUND)):
        assert error(np.asarray(got, np.float32), np.asarray(want, np.float32)) < 2 * bound
    for name, want in vjp(d)[0].items():
        got = joined(found[name]) if name in TOKENS else found[name].sum(0)
        assert error(np.asarray(got, np.float32), np.asarray(want, np.float32)) < 2 * GRADIENT_BOUND, name


def joined(parts: Any) -> Any:
    """The row of what the ranks have of it."""
    return jnp.concatenate([*parts], axis=1)
