"""Precision of products, sums over rows or channels, and the mesh axes that arrays vary over."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from kdacore.arrays.jax_meshes import mesh_axes as mesh_axes
from kdacore.arrays.jax_meshes import out_struct as out_struct
from kdacore.arrays.jax_meshes import summed_like as summed_like
from kdacore.arrays.jax_meshes import varying as varying
from kdacore.types import Request

Array = Any
F32 = jnp.float32


def product_precision(request: Request) -> lax.Precision:
    """Precision of the large products, whose operands are always float32 arrays.

    float32 inputs: full float32 everywhere. 16-bit inputs: on a GPU ``DEFAULT`` (tf32, 10 mantissa
    bits), on a TPU ``HIGH`` (three bf16 passes, about 16 bits), because a single bf16 pass there
    rounds the state operand to 8 bits and comes within a few percent of the contract's bound. A CPU
    ignores the setting.
    """
    if request.dtype == "float32":
        return lax.Precision.HIGHEST
    return lax.Precision.HIGH if request.device.type == "tpu" else lax.Precision.DEFAULT


def fusion_barrier(request: Request, x: Any) -> Any:
    """``x``, an array or a tree of them, which XLA may not fuse with the operations that read it.

    The operations around a segment depend on the number of tokens. XLA unrolls a loop over one
    segment, and the order of a fused sum depends on the fusion, so without the barrier a result's
    bits would depend on the number of tokens. On a CPU no barrier is needed.
    """
    return x if request.device.type == "cpu" else lax.optimization_barrier(x)


def unfused(product: Array) -> Array:
    """A product of two floats, rounded before it goes into a sum.

    Compilers make one operation of a product and a sum, which rounds once, where it suits the program's shapes. No
    compiler may leave out the choice here. An optimisation barrier is not enough on a CPU.
    """
    return jnp.where(product == product, product, jnp.nan)


def required(x: Array | None) -> Array:
    """Narrow an optional array that the request says is present."""
    if x is None:
        raise TypeError("an array named by the request is missing")
    return x


def dot(spec: str, a: Array, b: Array, precision: lax.Precision) -> Array:
    """``einsum`` of two operands with float32 accumulation and a stated precision."""
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=F32)


def dots(
    request: Request, spec: str, lefts: tuple[Array, ...], right: Array, precision: lax.Precision
) -> tuple[Array, ...]:
    """:func:`dot` of several operands, of as many rows, with one.

    On a TPU one product of all rows: it fills the matrix unit better, and the compiler takes its time for each product.
    Elsewhere as many products: a CPU would first copy the operands of a joint one, and take several times as long.
    """
    if request.device.type != "tpu":
        return tuple(dot(spec, left, right, precision) for left in lefts)
    return tuple(jnp.split(dot(spec, jnp.concatenate(lefts, -2), right, precision), len(lefts), -2))


def total(x: Array, axis: int) -> Array:
    """``sum(x, axis, keepdims=True)`` over one of the last two axes.

    The batch axes are merged first: XLA's CPU reductions are several times slower with many of
    them.
    """
    flat = jnp.sum(x.reshape(-1, *x.shape[-2:]), axis, keepdims=True)
    return flat.reshape(*x.shape[:-2], *flat.shape[-2:])
