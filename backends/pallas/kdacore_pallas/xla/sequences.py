"""Where the sequences of a recurrent or fused decode call lie among its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from kdacore.types import Request
from kdacore_pallas.xla.numerics import required

Array = Any


class Sequences(NamedTuple):
    """The sequences of a call; those without a slot are empty."""

    first: Array
    """``[N]`` int32: row of each sequence's first token in the flattened ``[B*T]`` axis."""
    length: Array
    """``[N]`` int32."""
    steps: Array | int
    """Tokens of the longest, at most T: wrong offsets must not cost hours."""

    def of_tokens(self, count: int) -> tuple[Array, Array, Array]:
        """Of each of ``count`` rows of tokens the sequence that it lies in, its place there, and whether it is one of
        the sequence's tokens."""
        row = jnp.arange(count, dtype=jnp.int32)
        last = self.first.shape[0] - 1
        sequence = jnp.clip(jnp.searchsorted(self.first, row, side="right").astype(jnp.int32) - 1, 0, last)
        place = row - self.first[sequence]
        return sequence, place, place < self.length[sequence]


def sequences_of(request: Request, cu_seqlens: Array | None, padding: Array) -> Sequences:
    """The sequences of a call.

    Args:
        request: of the call.
        cu_seqlens: offsets of a pack.
        padding: ``[N]`` bool: sequences without a slot.
    """
    if request.packed:
        cu = required(cu_seqlens).astype(jnp.int32)
        first, length = cu[:-1], cu[1:] - cu[:-1]
        steps = jnp.minimum(jnp.max(length), request.T)
    else:
        first = jnp.arange(request.N, dtype=jnp.int32) * request.T
        length = jnp.full((request.N,), request.T, jnp.int32)
        steps = request.T
    return Sequences(first, jnp.where(padding, 0, length), steps)
