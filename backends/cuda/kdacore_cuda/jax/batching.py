"""``vmap`` of a call: its axis becomes part of the call's own batch axis where that is possible, and
a loop where it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from kdacore.errors import UnsupportedError
from kdacore.types import Reason, Request, TensorSpec
from kdacore_cuda import unsupported_calls

SHARED = frozenset({"A_log", "dt_bias"})
"""Arguments that all rows of a batch have in common, and the results that are their gradients."""
_POOLS = frozenset({"cu_seqlens", "state_indices", "write_indices", "write_pool", "checkpoint_offsets"})
"""Arguments with which a call's rows are not one after another in its arrays."""

Arrays = Mapping[str, Any]


class Run(Protocol):
    """A call's launches on traced arrays."""

    def __call__(self, request: Request, arrays: Arrays, groups: int) -> dict[str, Any]:
        """Results by name. Those named in :data:`SHARED` begin with an axis of ``groups``: one for
        each of so many equal parts of the batch."""
        ...


def has_pools(request: Request) -> bool:
    """Whether a call's rows are not one after another in its arrays: it has a pack or a pool."""
    return any(request.has(name) for name in _POOLS)


def run_batched(run: Run, request: Request, arrays: Arrays) -> dict[str, Any]:
    """``run`` on these arrays, so that it can be mapped over by ``jax.vmap``.

    Who differentiates what comes back gets an UnsupportedError: gradients are joined around it, where
    there are any.
    """
    return _run_undifferentiated(_mappable(run, request, tuple(arrays), 1), request, arrays)


def run_looped(run: Run, request: Request, arrays: Arrays) -> dict[str, Any]:
    """As :func:`run_batched`, mapped over in a loop: for calls whose buffers outlive them, where the
    buffer of a larger call would be no row of smaller ones."""
    return _run_undifferentiated(_mappable(run, request, tuple(arrays), 1, joins=False), request, arrays)


def _run_undifferentiated(
    function: Callable[..., dict[str, Any]], request: Request, arrays: Arrays
) -> dict[str, Any]:
    call = jax.custom_vjp(function)

    def refuse(*_: Any) -> Any:
        got, want = "a call that JAX differentiates", "no gradients, or backend='xla'"
        reason = Reason("gradients", "has no gradients of pools and stages", got, want)
        raise UnsupportedError(request.op, "the call cannot be differentiated", {"cuda": (reason,)})

    call.defvjp(refuse, refuse)
    results = call(*arrays.values())
    return {name: x[0] if name in SHARED else x for name, x in results.items()}


def _mappable(
    run: Run, request: Request, names: tuple[str, ...], groups: int, joins: bool = True
) -> Callable[..., dict[str, Any]]:
    @custom_vmap
    def call(*arrays: Any) -> dict[str, Any]:
        return run(request, dict(zip(names, arrays, strict=True)), groups)

    @call.def_vmap
    def mapped(size: int, is_mapped: list[bool], *arrays: Any) -> tuple[dict[str, Any], Any]:
        axes = dict(zip(names, is_mapped, strict=True))
        merged = _merged(request, size, axes) if joins else None
        if merged is None:
            results = _loop(call, is_mapped, arrays)
        else:
            joined = [
                x if name in SHARED else _join(x, size, on)
                for (name, on), x in zip(axes.items(), arrays, strict=True)
            ]
            found = _mappable(run, merged, names, size * groups)(*joined)
            results = {name: x.reshape(size, -1, *x.shape[1:]) for name, x in found.items()}
        return results, dict.fromkeys(results, True)

    return call  # type: ignore[no-any-return]


def _join(x: Any, size: int, is_mapped: bool) -> Any:
    """The mapped axis, in front, joined with the batch axis behind it."""
    if not is_mapped:
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    return x.reshape(-1, *x.shape[2:])


def _loop(call: Callable[..., Any], is_mapped: list[bool], arrays: tuple[Any, ...]) -> Any:
    def one(mapped: tuple[Any, ...]) -> Any:
        remaining = iter(mapped)
        return call(*(next(remaining) if on else x for on, x in zip(is_mapped, arrays, strict=True)))

    return jax.lax.map(one, tuple(x for on, x in zip(is_mapped, arrays, strict=True) if on))


def _merged(request: Request, size: int, axes: Mapping[str, bool]) -> Request | None:
    """The request of one call in the place of ``size``; None where there is none."""
    r = request
    if has_pools(r) or any(on for name, on in axes.items() if name in SHARED):
        return None
    tensors = tuple(
        (name, spec if name in SHARED else TensorSpec((size * spec.shape[0], *spec.shape[1:]), spec.dtype))
        for name, spec in r.tensors
    )
    larger = dataclasses.replace(r, B=size * r.B, N=size * r.N, tensors=tensors)
    return None if unsupported_calls.grid_size(larger) else larger
