"""``vmap`` of a call: its axis becomes part of the call's own batch axis where that is possible, and
a loop where it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from kdacore.arrays.jax_placement import SHARED
from kdacore.errors import UnsupportedError
from kdacore.types import Reason, Request, TensorSpec
from kdacore_cuda import unsupported_calls
from kdacore_cuda.runtime.device_figures import planned

_POOLS = frozenset({"cu_seqlens", "state_indices", "write_indices", "write_pool", "checkpoint_offsets"})
"""Arguments with which a call's rows are not one after another in its arrays."""

Arrays = dict[str, Any]
"""Arrays by name."""
Run = Callable[[Request, Arrays, int], Arrays]
"""A call's launches on traced arrays: results by name, given the request, the arrays, and a number of groups. Results
named in :data:`kdacore.arrays.jax_placement.SHARED` begin with an axis of so many: one for each of as many equal parts
of the batch."""


NEW = "new_"


def new_name(argument: str) -> str:
    """The result that stands for an argument that a call writes."""
    return NEW + argument


def has_pools(request: Request) -> bool:
    """Whether a call's rows are not one after another in its arrays: it has a pack or a pool."""
    return any(request.has(name) for name in _POOLS)


def resized(request: Request, arrays: Arrays, **sizes: Any) -> Request:
    """The request of a call with other sizes, whose arrays are these."""
    tensors = tuple(
        (name, TensorSpec(tuple(arrays[name].shape), spec.dtype) if name in arrays else spec)
        for name, spec in request.tensors
    )
    return dataclasses.replace(request, tensors=tensors, **sizes)


def run_batched(run: Run, request: Request, arrays: Arrays, joins: bool = True) -> Arrays:
    """``run`` on these arrays, so that it can be mapped over by ``jax.vmap``.

    Who differentiates what comes back gets an UnsupportedError: gradients are joined around it, where
    there are any.

    Args:
        run: the call.
        request: what it is asked for.
        arrays: what it is given.
        joins: False: always mapped over in a loop, as calls whose buffers outlive them are: the buffer of a larger
            call would be no row of smaller ones.
    """
    call = jax.custom_vjp(_mappable(run, planned(request), tuple(arrays), 1, joins))

    def refuse(*_: Any) -> Any:
        got, want = "a call that JAX differentiates", "no gradients, or backend='xla'"
        reason = Reason("gradients", "has no gradients of pools and stages", got, want)
        raise UnsupportedError(request.op, "the call cannot be differentiated", {"cuda": (reason,)})

    call.defvjp(refuse, refuse)
    results = call(*arrays.values())
    return {name: x[0] if name in SHARED else x for name, x in results.items()}


def _mappable(
    run: Run, r: Request, names: tuple[str, ...], groups: int, joins: bool
) -> Callable[..., Arrays]:
    @custom_vmap
    def call(*arrays: Any) -> Arrays:
        return run(r, dict(zip(names, arrays, strict=True)), groups)

    @call.def_vmap
    def mapped(size: int, is_mapped: list[bool], *arrays: Any) -> tuple[Arrays, Any]:
        given = {name: (x, on) for name, x, on in zip(names, arrays, is_mapped, strict=True)}
        larger = r
        if joins and not has_pools(r) and not any(on for name, (_, on) in given.items() if name in SHARED):
            joined = {name: x if name in SHARED else _join(x, size, on) for name, (x, on) in given.items()}
            larger = resized(r, joined, B=size * r.B, N=size * r.N)
        if larger is r or unsupported_calls.grid_size(larger):
            results = _loop(call, is_mapped, arrays)
        else:
            found = _mappable(run, larger, names, size * groups, joins)(*joined.values())
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
