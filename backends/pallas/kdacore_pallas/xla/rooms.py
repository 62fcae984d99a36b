"""What the forward pass keeps for the backward, in the memory the gradients will leave in.

Once the backward has read what was kept of a segment it has that segment's gradients to put somewhere: they are
written over it. The first touch of fresh memory costs more than the arithmetic that fills it.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs
from kdacore_pallas.xla.layout import Plan, place
from kdacore_pallas.xla.numerics import F32, varying

Array = Any
Shape = tuple[int, ...]
Filled = dict[int, Array]
"""Some of the rooms, by their numbers."""


class Span(NamedTuple):
    """A part of a kept array."""

    room: int
    at: int
    """Its first number's place in the room."""
    first: int
    """Which number of the array that is."""
    length: int


class Rooms(NamedTuple):
    """Arrays ``[segments, numbers]``: the gradients of q, k, v, g and beta, and one for what finds no place there."""

    segments: int
    sizes: tuple[int, ...]
    """Numbers of a segment in each."""
    kept: tuple[Shape, ...]
    """What is kept of a segment, float32."""
    spans: tuple[tuple[Span, ...], ...]
    """Where each of these lies."""

    @property
    def used(self) -> tuple[int, ...]:
        """Rooms that hold something kept."""
        return tuple(sorted({span.room for spans in self.spans for span in spans}))

    def fresh(self, room: int, dtype: Any, axes: frozenset[str]) -> Array:
        """A room with nothing in it. The number it is full of is its own: of equal arrays XLA makes one, and copies."""
        return varying(jnp.full((self.segments, self.sizes[room]), room, dtype), axes)

    def empty(self, axes: frozenset[str]) -> Filled:
        """The rooms in use."""
        return {room: self.fresh(room, F32, axes) for room in self.used}

    def put(self, rooms: Filled, s: Array, arrays: tuple[Array, ...]) -> Filled:
        """Keep of segment ``s`` those of the arrays that are to be kept."""
        rooms = dict(rooms)
        for x, spans in zip(arrays, self.spans, strict=False):
            flat = x.reshape(1, -1)
            for room, at, first, length in spans:
                part = lax.slice_in_dim(flat, first, first + length, axis=1)
                rooms[room] = lax.dynamic_update_slice(rooms[room], part, place(s, at))
        return rooms

    def take(self, rooms: Filled, s: Array) -> tuple[Array, ...]:
        """What was kept of segment ``s``."""

        def one(shape: Shape, spans: tuple[Span, ...]) -> Array:
            parts = [lax.dynamic_slice(rooms[x.room], place(s, x.at), (1, x.length)) for x in spans]
            return jnp.concatenate(parts, axis=1).reshape(shape)

        return tuple(map(one, self.kept, self.spans))

    def leave(self, rooms: Filled, s: Array, gradients: tuple[Array, ...]) -> Filled:
        """Write the gradients of segment ``s`` where they will be returned, over what was kept of it.

        XLA copies a whole room unless all it writes depends on all it reads. What is read reaches some gradient, and
        every one is written plus a zero made of them all: nothing is greater than infinity.
        """
        zero = jnp.max(jnp.stack([x.reshape(-1)[0].astype(F32) for x in gradients])) > jnp.inf
        rooms = dict(rooms)
        for room, x in enumerate(gradients):
            rooms[room] = lax.dynamic_update_slice(
                rooms[room], x.reshape(1, -1) + zero.astype(x.dtype), place(s, 0)
            )
        return rooms


def make_rooms(
    plan: Plan, inputs: ChunkInputs, kept: tuple[Shape, ...], if_free: tuple[Shape, ...] = ()
) -> Rooms:
    """Where arrays of these shapes lie, those of ``if_free`` only where all find a place in the gradients.

    Gradients that are not float32 are half as wide: nothing is kept in those.
    """
    rows = plan.G * plan.C * plan.B
    sizes = [rows * prod(x.shape[2:]) for x in inputs[:5]]
    free = [n if x.dtype == F32 else 0 for n, x in zip(sizes, inputs[:5], strict=True)]
    if sum(map(prod, kept + if_free)) <= sum(free):
        kept += if_free
    left = max(0, sum(map(prod, kept)) - sum(free))
    return Rooms(plan.segments, (*sizes, left), kept, _spans((*free, left), kept))


def _spans(free: tuple[int, ...], kept: tuple[Shape, ...]) -> tuple[tuple[Span, ...], ...]:
    """The rooms are filled one after another."""
    room = at = 0
    found = []
    for count in map(prod, kept):
        spans, first = [], 0
        while first < count:
            part = min(count - first, free[room] - at)
            if part:
                spans.append(Span(room, at, first, part))
            first, at = first + part, at + part
            if at == free[room]:
                room, at = room + 1, 0
        found.append(tuple(spans))
    return tuple(found)
