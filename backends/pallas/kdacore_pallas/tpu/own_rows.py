"""The rows of a step's block that are tokens of its sequence; the others are not read, and belong to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from kdacore_pallas.tpu import tiles

Array = Any


@dataclass(frozen=True)
class OwnRows:
    """Rows ``first`` to ``end`` of a block; scalars of the kernel."""

    ragged: bool
    """Whether there may be others."""
    end: Any
    first: Any | None = None
    """None for 0: only the steps of a pack share blocks."""

    @property
    def shared(self) -> bool:
        """Whether others write the other rows."""
        return self.first is not None

    def _within(self, at: Array) -> Array:
        below = at < self.end
        return below if self.first is None else (at >= self.first) & below

    def only(self, a: Array) -> Array:
        """``[C, width]`` with zeros in other rows, which may hold anything."""
        return jnp.where(self._within(tiles.row_index(*a.shape)), a, 0.0) if self.ragged else a

    def merged(self, a: Array, others: Array) -> Array:
        """Own rows of ``a``, other rows of ``others``, both ``[C, width]``."""
        return jnp.where(self._within(tiles.row_index(*a.shape)), a, others)

    def merged_lanes(self, a: Array, others: Array) -> Array:
        """The same of ``[1, C]``, rows along the lanes."""
        return jnp.where(self._within(lax.broadcasted_iota(jnp.int32, a.shape, 1)), a, others)
