"""The few things the array API standard leaves open: dtypes, host integers, and writing into a caller's array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, TypeVar
from typing import cast as typed

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from kdacore.types import Array, Request
from kdacore_reference.exact import to_int64

F = TypeVar("F", bound=Callable[..., Any])


_namespaces: dict[type, Any] = {}


def namespace(array: Array) -> Any:
    """The array API namespace of ``array``, which only its type decides."""
    found = _namespaces.get(type(array))
    if found is None:
        found = _namespaces[type(array)] = array_namespace(array)
    return found


def plain(array: Array) -> Array:
    """The same values and memory, outside any autograd graph.

    Results go through it (or :func:`cast`) last: what autograd sees as a view made here, a caller may not change in
    place where a parameter needs a gradient.
    """
    return array.detach() if hasattr(array, "detach") else array


def beside(like: Array) -> Any:
    """The device for a new array that meets ``like``. JAX moves arrays that were not put on a device by itself, and
    compiles again for those that were, so there it is None."""
    return None if is_jax(like) else device(like)


def compute_dtype(xp: Any, request: Request) -> Any:
    """float64 for float64 inputs, float32 for every other."""
    return xp.float64 if request.dtype == "float64" else xp.float32


def cast(array: Array, dtype: Any) -> Array:
    """``array`` as ``dtype``; the array itself when it is that already."""
    array = plain(array)
    return array if array.dtype == dtype else namespace(array).astype(array, dtype)


def host_ints(array: Array) -> list[int]:
    """The values of a one-dimensional integer array as Python integers."""
    return [int(i) for i in to_int64(array)]


def index_array(indices: Sequence[int], like: Array) -> Array:
    """``indices`` as an integer array beside ``like``, to index with."""
    xp = namespace(like)
    return xp.asarray(list(indices), dtype=xp.int64 if _has_int64(xp) else xp.int32, device=beside(like))


def _has_int64(xp: Any) -> bool:
    """JAX has no 64-bit integers unless its x64 mode is on."""
    return not xp.__name__.startswith("jax") or bool(xp.asarray(1).dtype == xp.int64)


def is_jax(array: Array) -> bool:
    """Is this an immutable array, written through ``.at``?"""
    return hasattr(array, "at") and not hasattr(array, "detach")


def put(array: Array, where: Any, values: Array) -> Array:
    """``array`` after ``array[where] = values``: the same object, or for JAX, whose arrays are immutable, a new one."""
    if is_jax(array):
        return array.at[where].set(values)
    array[where] = values
    return array


def multiply_at(array: Array, where: Any, factor: Array) -> Array:
    """``array`` after ``array[where] *= factor``, as :func:`put`."""
    if is_jax(array):
        return array.at[where].multiply(factor)
    array[where] *= factor
    return array


def add_at(array: Array, where: Any, values: Array) -> Array:
    """``array`` after ``array[where] += values``, as :func:`put`."""
    if is_jax(array):
        return array.at[where].add(values)
    array[where] += values
    return array


def store(target: Array, where: Any, function: Callable[..., Array], *args: Array) -> Array:
    """``target`` after ``target[where] = function(*args)``, without a temporary where the array kind knows ``out=``."""
    if is_jax(target):
        return target.at[where].set(function(*args))
    function(*args, out=target[where])
    return target


def overflow_to_inf(array: Array) -> AbstractContextManager[Any]:
    """Inside, an overflow is the infinity it is in the other libraries, without NumPy's warning."""
    return np.errstate(over="ignore") if is_numpy_array(array) else nullcontext()


def compiled_for_jax(static: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Decorator: under JAX the function runs through ``jax.jit``, where eager calls would compile every operation.

    The first argument decides; ``static`` names arguments that are not arrays.
    """

    def decorate(function: F) -> F:
        @cache
        def jitted() -> Any:
            import jax

            # Compiling takes longer than running here, and the products are library calls at any level.
            options = {"xla_backend_optimization_level": 0}
            return jax.jit(function, static_argnames=static, compiler_options=options)

        @wraps(function)
        def call(first: Array, *args: Any, **options: Any) -> Any:
            return (jitted() if is_jax(first) else function)(first, *args, **options)

        return typed(F, call)

    return decorate


def dense(array: Array) -> Array:
    """The same values in row-major order; the array itself when it is that already."""
    xp = namespace(array)
    return xp.reshape(xp.reshape(array, (-1,)), array.shape)


def unit_stride(array: Array) -> Array:
    """The same values with neighbours along the last axis; the array itself where they are."""
    if is_jax(array):
        return array
    step = array.strides[-1] // array.itemsize if is_numpy_array(array) else array.stride(-1)
    return array if step == 1 else dense(array)


def fold_sum(array: Array) -> Array:
    """The sum over the first axis, in an order that zeros appended to it do not change: neighbours in pairs."""
    xp = namespace(array)
    while array.shape[0] > 1:
        if array.shape[0] % 2:
            array = xp.concat([array, xp.zeros_like(array[:1, ...])], axis=0)
        array = array[0::2, ...] + array[1::2, ...]
    return array[0, ...] if array.shape[0] else xp.sum(array, axis=0)


def write_rows(target: Array, rows: Sequence[int], values: Array) -> Array:
    """``target`` with ``target[rows[i]] = values[i]``, negative rows left out.

    NumPy and torch arrays are written in place and returned; a JAX array, which cannot be, is returned updated.
    """
    named = [(row, i) for i, row in enumerate(rows) if row >= 0]
    if not named:
        return target
    if is_jax(target):
        where = index_array([row for row, _ in named], target)
        taken = namespace(values).take(values, index_array([i for _, i in named], values), axis=0)
        return target.at[where].set(cast(taken, target.dtype))
    memory = plain(target)
    for row, i in named:
        memory[row, ...] = cast(values[i, ...], target.dtype)
    return target


def write_all(target: Array, values: Array) -> Array:
    """``target`` holding ``values``; in place where the array kind allows it."""
    if is_jax(target):
        return cast(values, target.dtype)
    plain(target)[...] = cast(values, target.dtype)
    return target
