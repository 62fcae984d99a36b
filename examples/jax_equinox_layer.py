"""Kimi Delta Attention as an equinox layer, stacked by a scan and trained for a few steps.

    pip install . jax equinox        # in a checkout of kdacore
    python examples/jax_equinox_layer.py

The layer is that of jax_byte_lm.py, which has the rest of a language model. As usual in equinox it takes one
sequence, and jax.vmap makes it take a batch. A few steps of gradient descent fit one batch, whose targets are its
inputs of the token before.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import kdacore


class KDALayer(eqx.Module):
    """Kimi Delta Attention with a bounded gate and a gated output."""

    qkv: eqx.nn.Linear
    gate: eqx.nn.Linear
    beta: eqx.nn.Linear
    A_log: jax.Array
    dt_bias: jax.Array
    norm: eqx.nn.RMSNorm
    out_gate: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        self.heads = heads
        self.qkv = eqx.nn.Linear(width, 3 * width, use_bias=False, key=keys[0])
        self.gate = eqx.nn.Linear(width, width, key=keys[1])
        self.beta = eqx.nn.Linear(width, heads, key=keys[2])
        self.A_log = jnp.zeros(heads)
        # Half-lives from a few tokens to a few thousand, spread over the channels.
        self.dt_bias = jnp.linspace(-8.0, -1.0, width).reshape(heads, width // heads)
        self.norm = eqx.nn.RMSNorm(width // heads, eps=1e-6, use_bias=False)
        self.out_gate = eqx.nn.Linear(width, width, use_bias=False, key=keys[3])
        self.out = eqx.nn.Linear(width, width, use_bias=False, key=keys[4])

    def __call__(self, x: jax.Array) -> jax.Array:
        """``x [T, width]`` to ``[T, width]``."""
        T, width = x.shape
        q, k, v = jnp.split(jax.vmap(self.qkv)(x).reshape(1, T, 3 * self.heads, -1), 3, axis=2)
        g, beta = jax.vmap(self.gate)(x).reshape(1, T, self.heads, -1), jax.vmap(self.beta)(x)[None]
        o, _ = kdacore.chunk_kda(
            q, k, v, g, beta, A_log=self.A_log, dt_bias=self.dt_bias,
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=True, lower_bound=-5.0,
        )  # fmt: skip
        o = jax.vmap(jax.vmap(self.norm))(o[0]).reshape(T, width)
        return jax.vmap(self.out)(o * jax.nn.silu(jax.vmap(self.out_gate)(x)))


def stack(layers: int, width: int, heads: int, key: jax.Array) -> KDALayer:
    """Layers with their arrays stacked along a first axis."""
    return eqx.filter_vmap(lambda key: KDALayer(width, heads, key))(jax.random.split(key, layers))


def run(stacked: KDALayer, x: jax.Array) -> jax.Array:
    """``x [B, T, width]`` through all layers: one compiled layer, whose backward recomputes it from its input."""
    arrays, rest = eqx.partition(stacked, eqx.is_array)

    @jax.checkpoint
    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        return x + jax.vmap(eqx.combine(one, rest))(x), None

    return jax.lax.scan(layer, x, arrays)[0]


@eqx.filter_jit
def step(stacked: KDALayer, x: jax.Array, target: jax.Array, rate: float) -> tuple[KDALayer, jax.Array]:
    """One step of gradient descent on the mean squared error."""
    error, gradients = eqx.filter_value_and_grad(lambda s: jnp.mean((run(s, x) - target) ** 2))(stacked)
    return eqx.apply_updates(stacked, jax.tree.map(lambda g: -rate * g, gradients)), error


def main(steps: int = 40) -> list[float]:
    """Train, and return the error of every step."""
    stacked = stack(layers=2, width=32, heads=2, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 32, 32))
    target = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    errors = []
    for _ in range(steps):
        stacked, error = step(stacked, x, target, 1.0)
        errors.append(float(error))
    print(f"mean squared error {errors[0]:.3f}, after {steps} steps {errors[-1]:.3f}")
    return errors


if __name__ == "__main__":
    main()
