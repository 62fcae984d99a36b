"""The gate, beta's sigmoid and the l2norm of q and k inside a kernel, with their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kdacore_pallas.gate_rates import held, rate_sigmoid, rate_softplus
from kdacore_pallas.tpu.options import KernelOptions

Array = Any
L2NORM_EPS = 1e-6


def log_decay(options: KernelOptions, x: Array, slope: Array | float) -> Array:
    """Natural-log decay from ``x = g + bias``; ``slope`` is ``exp(A_log)``, see :func:`.gate_rates.gate_rate`."""
    if options.gate == "log":
        return x
    if options.gate == "softplus":
        return held(-rate_softplus(slope, x))
    return _bound(options) * jax.nn.sigmoid(slope * held(x))


def beta_forward(options: KernelOptions, beta: Array) -> Array:
    if not options.beta_sigmoid:
        return beta
    return (2.0 if options.neg_eigval else 1.0) * jax.nn.sigmoid(beta)


def qk_l2norm(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2NORM_EPS)


def qk_l2norm_backward(x: Array, d: Array) -> Array:
    r = jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2NORM_EPS)
    y = x * r
    return r * (d - y * jnp.sum(d * y, axis=-1, keepdims=True))


def log_decay_backward(
    options: KernelOptions, x: Array, slope: Array | float, d: Array
) -> tuple[Array, Array]:
    """Gradients of ``x`` and (per element) of ``A_log``; ``slope`` is ``exp(A_log)``."""
    if options.gate == "log":
        return d, jnp.zeros_like(d)
    if options.gate == "softplus":
        return held(-d * rate_sigmoid(slope, x)), held(-d * held(rate_softplus(slope, x)))
    x = held(x)
    y = jax.nn.sigmoid(slope * x)
    # The rate is multiplied by what may be 0 first.
    dx = held(y * (1.0 - y) * slope * (d * _bound(options)))
    return dx, dx * x


def _bound(options: KernelOptions) -> float:
    if options.lower_bound is None:
        raise ValueError("the bounded gate needs lower_bound in the request")
    return options.lower_bound
