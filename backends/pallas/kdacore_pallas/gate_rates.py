"""``exp(A_log)``, and its products with functions of the gate's input, for all values that float32 has.

The plain JAX code and the TPU kernels share these. Nothing here is NaN unless an input is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
LARGEST = float(np.finfo(np.float32).max)
"""What ``exp(A_log)``, log decays and the gate's gradients are held to."""
_SMALLEST = float(np.finfo(np.float32).tiny)
SHRINK = 2.0**-24
"""Factor of the terms of a sum over tokens, so that the largest of them do not overflow."""


def held(x: Array) -> Array:
    """``x`` with infinities as the largest finite numbers."""
    return jnp.clip(x, -LARGEST, LARGEST)


def held_as(x: Array, dtype: Any) -> Array:
    """Float32 ``x`` as ``dtype``, finite."""
    most = float(jnp.finfo(dtype).max)
    return x if most > LARGEST else jnp.clip(x, -most, most).astype(dtype)


def gate_rate(A_log: Array) -> Array:
    """``exp(A_log)``, held; 0 where it is no normal float32."""
    a = jnp.minimum(jnp.exp(A_log), LARGEST)
    return jnp.where(a < _SMALLEST, 0.0, a)


def rate_softplus(a: Array, x: Array) -> Array:
    """``a softplus(x)``, perhaps infinite.

    Where ``exp(x)`` is no normal number a large rate still makes something of it: of its root, twice.
    """
    x = jnp.minimum(x, LARGEST)  # a rate of 0 times this is 0
    root = jnp.exp(-0.5 * jnp.abs(x))
    high = a * (jnp.maximum(x, 0.0) + jnp.log1p(root * root))
    return jnp.where(x < -17.0, (a * root) * root, high)


def rate_sigmoid(a: Array, x: Array) -> Array:
    """``a sigmoid(x)``."""
    root = jnp.exp(-0.5 * jnp.abs(x))
    return jnp.where(x < -17.0, (a * root) * root, a * jax.nn.sigmoid(x))
