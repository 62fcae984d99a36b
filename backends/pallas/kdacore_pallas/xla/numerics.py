"""Precision of products, sums over rows or channels, and the mesh axes that arrays vary over."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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


def required(x: Array | None) -> Array:
    """Narrow an optional array that the request says is present."""
    if x is None:
        raise TypeError("an array named by the request is missing")
    return x


def dot(spec: str, a: Array, b: Array, precision: lax.Precision) -> Array:
    """``einsum`` of two operands with float32 accumulation and a stated precision."""
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=F32)


def total(x: Array, axis: int) -> Array:
    """``sum(x, axis, keepdims=True)`` over one of the last two axes.

    The batch axes are merged first: XLA's CPU reductions are several times slower with many of
    them.
    """
    flat = jnp.sum(x.reshape(-1, *x.shape[-2:]), axis, keepdims=True)
    return flat.reshape(*x.shape[:-2], *flat.shape[-2:])


def mesh_axes(*arrays: Array) -> frozenset[str]:
    """Axes of a ``shard_map`` mesh over which any of the arrays varies."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        if x is not None:
            kind = jax.typeof(x)
            # jax 0.10 calls it manual_axis_type.varying, releases before it vma.
            manual = getattr(kind, "manual_axis_type", None)
            axes |= getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return axes


def out_struct(shape: tuple[int, ...], dtype: Any, *arrays: Array) -> jax.ShapeDtypeStruct:
    """Shape of a kernel's output, varying over the mesh axes that any of its inputs varies over."""
    kind = getattr(jax.typeof(arrays[0]), "manual_axis_type", None)
    if kind is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=type(kind)(varying=mesh_axes(*arrays)))


def varying(x: Array, axes: frozenset[str]) -> Array:
    """``x`` marked as varying over ``axes``, so that a scan may carry it together with sharded
    values."""
    missing = tuple(sorted(axes - mesh_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def summed_like(grad: Array, primal: Array) -> Array:
    """``grad`` in the dtype of ``primal``, summed over the mesh axes along which ``primal`` is
    replicated."""
    extra = tuple(sorted(mesh_axes(grad) - mesh_axes(primal)))
    if extra:
        grad = lax.psum(grad, extra)
    return grad.astype(primal.dtype)
