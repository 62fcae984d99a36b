"""A chunked call on a TPU in parts of its batch and heads, one after another.

All heads of a chunk are one batch of products, and the TPU compiler writes out the batches of each
product: a forward of 32 heads takes it 5 s, one of 96 half a minute, a gradient several times that.
So at most ``TOGETHER`` value heads, of as many rows of the batch as there is place for, are one
program, in a loop. The loop reads its part of the caller's arrays and writes its part of the
results, so nothing is copied beyond one part. Nothing is saved for the backward, which computes
again what it needs, part by part: saved arrays of all parts took 5 to 8 times the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kdacore.arrays.jax_placement import first_of_each, part_of
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request
from kdacore_pallas.xla import chunk_backward, chunk_forward
from kdacore_pallas.xla.call_axes import arrays_of, axes_of, batch_is_whole
from kdacore_pallas.xla.numerics import mesh_axes, varying

Array = Any
Arrays = dict[str, Array]
TOGETHER = 32
"""Value heads, those of all rows of the batch counted, in one program."""


class Parts(NamedTuple):
    """The number of parts that a call is computed in."""

    rows: int
    heads: int

    @property
    def total(self) -> int:
        return self.rows * self.heads


def parts_of(request: Request) -> Parts:
    """The parts of a call: of the batch first, then of the heads; each divides what it is of. Elsewhere than on a TPU
    one."""
    if request.device.type != "tpu":
        return Parts(1, 1)
    rows, heads = 1, 1
    if not batch_is_whole(request):
        rows = _divisor(request.B, max(1, TOGETHER // request.HV))
    heads = _divisor(request.H, max(1, TOGETHER // (request.B // rows * request.HV // request.H)))
    return Parts(rows, heads)


def _divisor(size: int, most: int) -> int:
    """The smallest number of equal parts of ``size``, each of at most ``most``."""
    return next(n for n in range(1, size + 1) if size % n == 0 and size // n <= most)


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """:func:`kdacore_pallas.xla.chunk_forward.forward`, which saves nothing where there are parts."""
    parts = parts_of(request)
    if parts.total == 1:
        return chunk_forward.forward(request, inputs)
    own = replace(part_of(request, *parts), needs_grad=False)
    arrays = arrays_of(inputs)

    def one(n: Array) -> Outputs:
        return chunk_forward.forward(own, ChunkInputs(**_part(request, parts, arrays, n)))

    def named(out: Outputs) -> Arrays:
        found = zip(Outputs._fields[:3], out[:3], strict=True)
        return {name: x for name, x in found if x is not None}

    def body(results: Arrays, n: Array) -> tuple[Arrays, None]:
        return _with_part(request, parts, results, named(one(n)), n), None

    shapes = named(_shapes(one))
    room = _room(request, parts, shapes, dict.fromkeys(shapes, mesh_axes(*inputs)))
    results, _ = lax.scan(body, room, _numbers(parts))
    return Outputs(results["o"], results.get("final_state"), results.get("checkpoints"))


def backward(
    request: Request, inputs: ChunkInputs, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """:func:`kdacore_pallas.xla.chunk_backward.backward`."""
    parts = parts_of(request)
    if parts.total == 1:
        return chunk_backward.backward(request, inputs, saved, grads)
    own = part_of(request, *parts)
    arrays, cotangents = arrays_of(inputs), {f"d_{name}": x for name, x in arrays_of(grads).items()}

    def one(n: Array) -> Arrays:
        d = _part(request, parts, cotangents, n)
        mine = ChunkInputs(**_part(request, parts, arrays, n))
        given = OutputGrads(*(d.get(f"d_{name}") for name in OutputGrads._fields))
        return arrays_of(chunk_backward.backward(own, mine, (), given))

    def body(results: Arrays, n: Array) -> tuple[Arrays, None]:
        return _with_part(request, parts, results, one(n), n), None

    room = _room(request, parts, _shapes(one), {name: mesh_axes(x) for name, x in arrays.items()})
    results, _ = lax.scan(body, room, _numbers(parts))
    return InputGrads(*(results.get(name) for name in InputGrads._fields))


def _numbers(parts: Parts) -> Array:
    return jnp.arange(parts.total, dtype=jnp.int32)


def _shapes(one: Callable[[Array], Any]) -> Any:
    return jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))


def _split_axes(request: Request, parts: Parts, name: str, ndim: int) -> list[tuple[int, int, bool]]:
    """The axes along which an array is cut: each as its number, how many parts it is cut into, and whether it is the
    batch (or else heads)."""
    split = []
    for at, word in enumerate(first_of_each(axes_of(request, name, ndim))):
        if word == "b" and parts.rows > 1:
            split.append((at, parts.rows, True))
        if word == "h" and parts.heads > 1:
            split.append((at, parts.heads, False))
    return split


def _number(parts: Parts, n: Array, of_batch: bool) -> Array:
    return n // parts.heads if of_batch else n % parts.heads


def _part(request: Request, parts: Parts, arrays: Arrays, n: Array) -> Arrays:
    """Part ``n`` of arrays."""
    found = {}
    for name, x in arrays.items():
        for axis, count, of_batch in _split_axes(request, parts, name, x.ndim):
            size = x.shape[axis] // count
            x = lax.dynamic_slice_in_dim(x, _number(parts, n, of_batch) * size, size, axis)
        found[name] = x
    return found


def _room(request: Request, parts: Parts, part: Arrays, axes: dict[str, frozenset[str]]) -> Arrays:
    """Zeros for whole results, of which one part has these shapes, varying over these mesh axes."""
    found = {}
    for name, x in part.items():
        shape = list(x.shape)
        for axis, count, _ in _split_axes(request, parts, name, x.ndim):
            shape[axis] *= count
        found[name] = varying(jnp.zeros(shape, x.dtype), axes[name])
    return found


def _with_part(request: Request, parts: Parts, results: Arrays, part: Arrays, n: Array) -> Arrays:
    """Results with part ``n`` written. What sequences share is summed over the batch."""
    found = {}
    for name, x in part.items():
        split = _split_axes(request, parts, name, x.ndim)
        start: list[Array] = [jnp.int32(0)] * x.ndim
        for axis, _, of_batch in split:
            start[axis] = _number(parts, n, of_batch) * x.shape[axis]
        if parts.rows > 1 and not any(of_batch for _, _, of_batch in split):
            x = x + lax.dynamic_slice(results[name], start, x.shape)
        found[name] = lax.dynamic_update_slice(results[name], x, start)
    return found
