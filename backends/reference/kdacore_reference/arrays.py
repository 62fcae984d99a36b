"""Array helpers beyond the array API standard: dtypes, in-place writes, NumPy's BLAS threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from typing import cast as typed

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from kdacore import config
from kdacore.types import Array, Request

F = TypeVar("F", bound=Callable[..., Any])


_namespaces: dict[type, Any] = {}


def namespace(array: Array) -> Any:
    """The array API namespace of ``array``. It depends on the array's type alone."""
    found = _namespaces.get(type(array))
    if found is None:
        found = _namespaces[type(array)] = array_namespace(array)
    return found


def plain(array: Array) -> Array:
    """The same values and memory, outside any autograd graph.

    Results pass through it (or :func:`cast`) last: callers could not change a view that autograd
    tracks in place where a parameter needs a gradient.
    """
    return array.detach() if hasattr(array, "detach") else array


def device_of(like: Array) -> Any:
    """The device for a new array to be combined with ``like``. None for JAX, which moves
    uncommitted arrays by itself and would compile again for committed ones."""
    return None if is_jax(like) else device(like)


def compute_dtype(xp: Any, request: Request) -> Any:
    """float64 for float64 inputs, float32 for every other."""
    return xp.float64 if request.dtype == "float64" else xp.float32


def cast(array: Array, dtype: Any) -> Array:
    """``array`` as ``dtype``; the array itself when it is that already."""
    array = plain(array)
    return array if array.dtype == dtype else namespace(array).astype(array, dtype)


def state_dtype(request: Request, inputs: Any, xp: Any) -> Any:
    """dtype of every state of a call: that of those given, which NumPy may lack by name, or float32
    (float64 for float64 inputs)."""
    for name in ("initial_state", "write_pool"):
        given = getattr(inputs, name, None)
        if given is not None:
            return given.dtype
    return getattr(xp, request.state_dtype)


def state_layout(state: Array, request: Request) -> Array:
    """``[.., K, V]`` to the caller's layout, or back."""
    return namespace(state).matrix_transpose(state) if request.state_v_first else state


def index_array(indices: Sequence[int], like: Array) -> Array:
    """``indices`` as an integer array on the device of ``like``, to index with."""
    xp = namespace(like)
    return xp.asarray(list(indices), dtype=xp.int64 if _has_int64(xp) else xp.int32, device=device_of(like))


def _has_int64(xp: Any) -> bool:
    """JAX has no 64-bit integers unless its x64 mode is on."""
    return not xp.__name__.startswith("jax") or bool(xp.asarray(1).dtype == xp.int64)


def is_jax(array: Array) -> bool:
    """Whether this is an immutable array, updated through ``.at``."""
    return hasattr(array, "at") and not hasattr(array, "detach")


def put(array: Array, where: Any, values: Array) -> Array:
    """``array`` after ``array[where] = values``: the same object, or for JAX, whose arrays are
    immutable, a new one."""
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
    """``target`` after ``target[where] = function(*args)``, without a temporary where the array
    kind knows ``out=``."""
    if is_jax(target):
        return target.at[where].set(function(*args))
    function(*args, out=target[where])
    return target


def without_float_errors(function: F) -> F:
    """Decorator: NumPy computes as the other libraries do, giving infinity, zero or NaN without a
    warning, whatever the caller's ``np.errstate`` asks for. An exponential that underflows is no
    error here, and a call that raised half way would have written some of its results."""

    @wraps(function)
    def call(request: Request, *args: Any) -> Any:
        if request.kind != "numpy":
            return function(request, *args)
        with np.errstate(all="ignore"):
            return function(request, *args)

    return typed(F, call)


def overflow_to_inf(array: Array) -> AbstractContextManager[Any]:
    """Inside, an overflow gives infinity without NumPy's warning, as in the other libraries."""
    return np.errstate(over="ignore") if is_numpy_array(array) else nullcontext()


def compiled_for_jax(static: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Decorator: under JAX the function runs through ``jax.jit``, where eager calls would compile
    every operation.

    The first argument decides; ``static`` names arguments that are not arrays.
    """

    def decorate(function: F) -> F:
        @cache
        def jitted() -> Any:
            import jax

            # Compiling takes longer than running here, and the products are library calls at any
            # level.
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
    """The same values with stride 1 along the last axis; the array itself if it has that already."""
    if is_jax(array):
        return array
    step = array.strides[-1] // array.itemsize if is_numpy_array(array) else array.stride(-1)
    return array if step == 1 else dense(array)


def fold_sum(array: Array) -> Array:
    """The sum over the first axis by pairs of neighbours: appended zeros do not change the order of
    additions."""
    xp = namespace(array)
    while array.shape[0] > 1:
        if array.shape[0] % 2:
            array = xp.concat([array, xp.zeros_like(array[:1, ...])], axis=0)
        array = array[0::2, ...] + array[1::2, ...]
    return array[0, ...] if array.shape[0] else xp.sum(array, axis=0)


def write_rows(target: Array, rows: Sequence[int], values: Array) -> Array:
    """``target`` with ``target[rows[i]] = values[i]``; negative rows are skipped.

    NumPy and torch arrays are written in place and returned. For JAX an updated array is returned.
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


class Blas(NamedTuple):
    """Read and set the number of threads of a BLAS."""

    get_threads: Callable[[], int]
    set_threads: Callable[[int], None]


@cache
def bundled_openblas() -> Blas | None:
    """Thread control of the OpenBLAS inside NumPy's wheel; None for a NumPy built otherwise."""
    folder = Path(np.__file__).parent
    for path in sorted([*folder.parent.glob("numpy.libs/*openblas*"), *folder.glob(".dylibs/*openblas*")]):
        library = ctypes.CDLL(str(path))
        for pattern in ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads"):
            if hasattr(library, pattern.format("get")) and hasattr(library, pattern.format("set")):
                return Blas(getattr(library, pattern.format("get")), getattr(library, pattern.format("set")))
    return None


class SingleThreadedBlas:
    """Keep the BLAS at one thread while any caller is inside; the last caller to leave restores the
    setting."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = 1

    def renew_in_child(self) -> None:
        """Start anew in a forked child, which has none of the threads that were inside and would
        wait for them."""
        self.lock = threading.Lock()
        if self.inside and (blas := bundled_openblas()) is not None:
            blas.set_threads(self.before)
        self.inside = 0

    @contextmanager
    def hold(self, blas: Blas) -> Iterator[int]:
        """Yields the number of threads the BLAS was allowed."""
        with self.lock:
            if self.inside == 0:
                self.before = blas.get_threads()
                blas.set_threads(1)
            self.inside += 1
        try:
            yield self.before
        finally:
            with self.lock:
                self.inside -= 1
                if self.inside == 0:
                    blas.set_threads(self.before)


single_threaded_blas = SingleThreadedBlas()
config.renew_in_child(single_threaded_blas.renew_in_child)
