"""The layer in equinox is the layer in flax, and learns."""

from __future__ import annotations

from types import ModuleType

import jax
import numpy as np
import pytest


def test_it_computes_what_the_layer_in_flax_computes(
    jax_byte_lm: ModuleType, jax_equinox_layer: ModuleType
) -> None:
    import equinox as eqx
    from flax import nnx

    theirs = jax_byte_lm.KDALayer(nnx.Rngs(0))
    ours = jax_equinox_layer.KDALayer(jax_byte_lm.WIDTH, jax_byte_lm.HEADS, jax.random.key(1))
    for name in ("qkv", "gate", "beta", "out_gate", "out"):
        kernel = getattr(theirs, name).kernel[...].T
        ours = eqx.tree_at(lambda m, n=name: getattr(m, n).weight, ours, kernel)
        if getattr(ours, name).bias is not None:
            ours = eqx.tree_at(lambda m, n=name: getattr(m, n).bias, ours, getattr(theirs, name).bias[...])
    x = jax.random.normal(jax.random.key(2), (2, 9, jax_byte_lm.WIDTH))
    want = nnx.jit(lambda layer, x: layer(x)[0])(theirs, x)
    np.testing.assert_allclose(
        eqx.filter_jit(lambda layer, x: jax.vmap(layer)(x))(ours, x), want, rtol=1e-4, atol=1e-5
    )


@pytest.mark.exhaustive
def test_every_parameter_learns_and_the_error_falls(jax_equinox_layer: ModuleType) -> None:
    m = jax_equinox_layer
    errors = m.main(steps=20)
    assert np.isfinite(errors).all() and errors[-1] < 0.9 * errors[0]
    before = m.stack(layers=2, width=32, heads=2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 32, 32))
    after, _ = m.step(before, x, -x, 1.0)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
    assert all(jax.tree.leaves(moved))
