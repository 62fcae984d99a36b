"""The few things the array API standard leaves open: dtypes, host integers, and writing into a caller's array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace, device

from kdacore.types import Array, Request
from kdacore_reference.exact import to_int64


def plain(array: Array) -> Array:
    """The same values and memory, outside any autograd graph."""
    return array.detach() if hasattr(array, "detach") else array


def compute_dtype(xp: Any, request: Request) -> Any:
    """float64 for float64 inputs, float32 for every other."""
    return xp.float64 if request.dtype == "float64" else xp.float32


def cast(array: Array, dtype: Any) -> Array:
    """``array`` as ``dtype``; the array itself when it is that already."""
    array = plain(array)
    return array if array.dtype == dtype else array_namespace(array).astype(array, dtype)


def host_ints(array: Array) -> list[int]:
    """The values of a one-dimensional integer array as Python integers."""
    return [int(i) for i in to_int64(array)]


def index_array(indices: Sequence[int], like: Array) -> Array:
    """``indices`` as an integer array beside ``like``, to index with."""
    xp = array_namespace(like)
    return xp.asarray(list(indices), dtype=xp.int64 if _has_int64(xp) else xp.int32, device=device(like))


def _has_int64(xp: Any) -> bool:
    """JAX has no 64-bit integers unless its x64 mode is on."""
    return not xp.__name__.startswith("jax") or bool(xp.asarray(1).dtype == xp.int64)


def write_rows(target: Array, rows: Sequence[int], values: Array) -> Array:
    """``target`` with ``target[rows[i]] = values[i]``, negative rows left out.

    NumPy and torch arrays are written in place and returned; a JAX array, which cannot be, is returned updated.
    """
    named = [(row, i) for i, row in enumerate(rows) if row >= 0]
    if not named:
        return target
    if hasattr(target, "at") and not hasattr(target, "detach"):
        where = index_array([row for row, _ in named], target)
        taken = array_namespace(values).take(values, index_array([i for _, i in named], values), axis=0)
        return target.at[where].set(cast(taken, target.dtype))
    memory = plain(target)
    for row, i in named:
        memory[row, ...] = cast(values[i, ...], target.dtype)
    return target


def write_all(target: Array, values: Array) -> Array:
    """``target`` holding ``values``; in place where the array kind allows it."""
    if hasattr(target, "at") and not hasattr(target, "detach"):
        return cast(values, target.dtype)
    plain(target)[...] = cast(values, target.dtype)
    return target
