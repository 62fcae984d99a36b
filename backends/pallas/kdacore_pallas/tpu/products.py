"""Matrix products with a stated precision, inside kernels.

A TPU multiplies bfloat16 matrices and accumulates in float32. A float32 product is a sum of such
passes, and the number of passes is always stated here, never left to a default:

* ``Passes.EXACT``: six passes (``HIGHEST``), float32 accuracy; float32 inputs use nothing else.
* ``Passes.SPLIT``: three passes over a two-way split of both operands, about 16 mantissa bits.
* ``Passes.ONE``: both operands rounded to bfloat16.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any
NN = (((1,), (0,)), ((), ()))
"""``a @ b``"""
NT = (((1,), (1,)), ((), ()))
"""``a @ b.T``"""
TN = (((0,), (0,)), ((), ()))
"""``a.T @ b``"""


class Passes(Enum):
    ONE = 1
    SPLIT = 3
    EXACT = 6


def _half(x: Array) -> Array:
    return x.astype(jnp.bfloat16)


def _pass(a: Array, b: Array, dims: Any) -> Array:
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def product(a: Array, b: Array, dims: Any, passes: Passes) -> Array:
    """Product of two float32 matrices, accumulated in float32."""
    if passes is Passes.EXACT:
        return lax.dot_general(
            a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
    ah, bh = _half(a), _half(b)
    if passes is Passes.ONE:
        return _pass(ah, bh, dims)
    al = _half(a - ah.astype(jnp.float32))
    bl = _half(b - bh.astype(jnp.float32))
    (ca,), (cb,) = dims[0]
    return _pass(jnp.concatenate([ah, ah, al], ca), jnp.concatenate([bh, bl, bh], cb), dims)
