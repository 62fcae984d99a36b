"""Layout of the arrays that the forward saves for the backward, inside the buffers of the
gradients.

The backward returns gradients in the same buffers: after it has read what was saved of a segment,
it overwrites that with the segment's gradients. This avoids new memory, whose first touch costs
more than the arithmetic that fills it.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs
from kdacore_pallas.xla.numerics import F32, varying
from kdacore_pallas.xla.plan import ChunkPlan, slice_start

Array = Any
Shape = tuple[int, ...]
GradBuffers = dict[int, Array]
"""Some of the buffers, by number."""


class Span(NamedTuple):
    """Consecutive elements of a saved array."""

    buffer: int
    offset: int
    """Position in the buffer of the first element."""
    first: int
    """Index of that element in the flattened array."""
    length: int


class SavedLayout(NamedTuple):
    """Buffers ``[segments, elements]``: the gradients of q, k, v, g and beta (0 to 4), and one more
    (5) for what does not fit in those.
    """

    segments: int
    sizes: tuple[int, ...]
    """Elements of a segment in each buffer."""
    saved: tuple[Shape, ...]
    """Shapes of the arrays saved of a segment, float32."""
    spans: tuple[tuple[Span, ...], ...]
    """Spans of each of these arrays."""

    @property
    def used(self) -> tuple[int, ...]:
        """Numbers of the buffers that hold saved elements."""
        return tuple(sorted({span.buffer for spans in self.spans for span in spans}))

    def new_buffer(self, buffer: int, dtype: Any, axes: frozenset[str]) -> Array:
        """An unused buffer, filled with its number: XLA would make one array of equal ones, and
        then copy it."""
        return varying(jnp.full((self.segments, self.sizes[buffer]), buffer, dtype), axes)

    def new_buffers(self, axes: frozenset[str]) -> GradBuffers:
        """The buffers in use."""
        return {n: self.new_buffer(n, F32, axes) for n in self.used}

    def store(self, buffers: GradBuffers, s: Array, arrays: tuple[Array, ...]) -> GradBuffers:
        """Save the arrays of segment ``s`` that the layout has a place for."""
        buffers = dict(buffers)
        for x, spans in zip(arrays, self.spans, strict=False):
            flat = x.reshape(1, -1)
            for n, offset, first, length in spans:
                part = lax.slice_in_dim(flat, first, first + length, axis=1)
                buffers[n] = lax.dynamic_update_slice(buffers[n], part, slice_start(s, offset))
        return buffers

    def load(self, buffers: GradBuffers, s: Array) -> tuple[Array, ...]:
        """The arrays saved of segment ``s``."""

        def one(shape: Shape, spans: tuple[Span, ...]) -> Array:
            parts = [
                lax.dynamic_slice(buffers[x.buffer], slice_start(s, x.offset), (1, x.length)) for x in spans
            ]
            return jnp.concatenate(parts, axis=1).reshape(shape)

        return tuple(map(one, self.saved, self.spans))

    def write_gradients(self, buffers: GradBuffers, s: Array, gradients: tuple[Array, ...]) -> GradBuffers:
        """Write the gradients of segment ``s`` to their buffers, over what was saved of it.

        XLA copies a whole buffer unless every write to it depends on every read from it. Everything
        read contributes to some gradient, so each gradient is written plus a zero computed from all
        of them (nothing is greater than infinity).
        """
        zero = jnp.max(jnp.stack([x.reshape(-1)[0].astype(F32) for x in gradients])) > jnp.inf
        buffers = dict(buffers)
        for n, x in enumerate(gradients):
            buffers[n] = lax.dynamic_update_slice(
                buffers[n], x.reshape(1, -1) + zero.astype(x.dtype), slice_start(s, 0)
            )
        return buffers


def make_saved_layout(
    plan: ChunkPlan, inputs: ChunkInputs, saved: tuple[Shape, ...], if_free: tuple[Shape, ...] = ()
) -> SavedLayout:
    """The layout of arrays of these shapes; those of ``if_free`` are included if everything fits in
    the gradients.

    Nothing is saved in gradients that are not float32: they are half as wide.
    """
    rows = plan.G * plan.C * plan.B
    sizes = [rows * prod(x.shape[2:]) for x in inputs[:5]]
    free = [n if x.dtype == F32 else 0 for n, x in zip(sizes, inputs[:5], strict=True)]
    if sum(map(prod, saved + if_free)) <= sum(free):
        saved += if_free
    rest = max(0, sum(map(prod, saved)) - sum(free))
    return SavedLayout(plan.segments, (*sizes, rest), saved, _spans((*free, rest), saved))


def _spans(free: tuple[int, ...], saved: tuple[Shape, ...]) -> tuple[tuple[Span, ...], ...]:
    """Fill the buffers one after another; ``free`` is the space in each."""
    buffer = offset = 0
    found = []
    for count in map(prod, saved):
        spans, first = [], 0
        while first < count:
            part = min(count - first, free[buffer] - offset)
            if part:
                spans.append(Span(buffer, offset, first, part))
            first, offset = first + part, offset + part
            if offset == free[buffer]:
                buffer, offset = buffer + 1, 0
        found.append(tuple(spans))
    return tuple(found)
