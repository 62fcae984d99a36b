"""Layout of the arrays that the forward saves for the backward on TPUs: stacked by segments, apart from the gradients.

A TPU stores the last two axes of an array in tiles of 8 x 128, so flattening an array, as :mod:`.saved_layout` does to
save it inside the gradients' buffers, moves every number of it.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs
from kdacore_pallas.xla.numerics import F32, varying
from kdacore_pallas.xla.plan import ChunkPlan
from kdacore_pallas.xla.saved_layout import GradBuffers

Array = Any
Shape = tuple[int, ...]
STATE, PAIR = 5, 6
"""Numbers of the buffers of saved arrays, after those of the gradients of q, k, v, g and beta (0 to 4)."""


class SavedApart(NamedTuple):
    """Buffers ``[segments, ...]``, used as those of :class:`kdacore_pallas.xla.saved_layout.SavedLayout` are."""

    segments: int
    shapes: tuple[Shape, ...]
    """Shapes of a segment's part of each buffer."""
    used: tuple[int, ...]
    """Numbers of the buffers that hold saved arrays."""

    def new_buffer(self, buffer: int, dtype: Any, axes: frozenset[str]) -> Array:
        """An unused buffer."""
        return varying(jnp.zeros((self.segments, *self.shapes[buffer]), dtype), axes)

    def new_buffers(self, axes: frozenset[str]) -> GradBuffers:
        """The buffers of saved arrays."""
        return {n: self.new_buffer(n, F32, axes) for n in self.used}

    def store(self, buffers: GradBuffers, s: Array, arrays: tuple[Array, ...]) -> GradBuffers:
        """Save a segment's state and, where the layout has a place for it, its interactions: two ``[..., C, C]`` side
        by side, because 128 columns take the space of 64."""
        buffers = buffers | {STATE: _with(buffers[STATE], s, arrays[0])}
        if PAIR in self.used:
            buffers[PAIR] = _with(buffers[PAIR], s, jnp.concatenate(arrays[1:3], -1))
        return buffers

    def load(self, buffers: GradBuffers, s: Array) -> tuple[Array, ...]:
        """The arrays saved of segment ``s``."""
        state, *pairs = (lax.dynamic_index_in_dim(buffers[n], s, 0, keepdims=False) for n in self.used)
        return state, *(half for both in pairs for half in jnp.split(both, 2, -1))

    def write_gradients(self, buffers: GradBuffers, s: Array, gradients: tuple[Array, ...]) -> GradBuffers:
        """Write the gradients of segment ``s``."""
        return buffers | {n: _with(buffers[n], s, x) for n, x in enumerate(gradients)}


def make_saved_apart(plan: ChunkPlan, inputs: ChunkInputs, state: Shape, states_only: bool) -> SavedApart:
    """The layout of a call that saves the state at each segment's start, of this shape, and unless ``states_only`` the
    interactions."""
    rows = (plan.G, plan.B, plan.C)
    gradients = tuple((*rows, x.shape[2], prod(x.shape[3:])) for x in inputs[:5])
    pair = (plan.M, plan.R, plan.C, 2 * plan.C)
    return SavedApart(plan.segments, (*gradients, state, pair), (STATE,) if states_only else (STATE, PAIR))


def _with(buffer: Array, s: Array, x: Array) -> Array:
    return lax.dynamic_update_index_in_dim(buffer, x, s, 0)
