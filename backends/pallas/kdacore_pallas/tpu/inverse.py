"""``(I + L)^-1`` of a strictly lower triangular ``L`` ``[C, C]``: exact block substitution, two
ways.

Both join halves as ``[[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]``: nothing but
inverses of diagonal blocks is ever formed, so near-collinear keys (entries of ``L`` near one) lose
no accuracy.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore_pallas.tpu import tiles
from kdacore_pallas.tpu.products import NN, Passes, product
from kdacore_pallas.tpu.sizes import LANES

Array = Any


def by_merging(L: Array, passes: Passes) -> Array:
    """Every level of the tree on the matrix unit."""
    C = L.shape[0]
    near = tiles.pack_diagonal(L)
    first = jnp.where(tiles.packed_identity(C), 1.0, jnp.where(tiles.small_pairs(C, 1), -near, 0.0))
    inverse = tiles.unpack_diagonal(first)
    for s in (2, 4):
        corner = tiles.unpack_diagonal(jnp.where(tiles.small_pairs(C, s), near, 0.0))
        inverse = inverse - product(inverse, product(corner, inverse, NN, passes), NN, passes)
    return _merge_tiles(inverse, L, passes)


def by_substitution(L: Array, passes: Passes) -> Array:
    """Tiles of 8 rows by forward substitution, all of them side by side in one register; then
    merging."""
    near = _invert_packed(tiles.pack_diagonal(L))
    return _merge_tiles(tiles.unpack_diagonal(near), L, passes)


def _merge_tiles(inverse: Array, L: Array, passes: Passes) -> Array:
    """Join inverses of 8 x 8 diagonal blocks to that of the whole. Left rows of a level never
    change."""
    C = L.shape[0]
    for s in tiles.big_levels(C):
        corner = jnp.where(tiles.left_lanes(C, s), tiles.halves(L, s)[1], 0.0)
        left, right = tiles.halves(inverse, s)
        inner = product(corner, inverse, NN, passes)
        inner = tiles.join(jnp.zeros_like(inner), inner, s)
        inverse = tiles.join(left, right - product(right, inner, NN, passes), s)
    return inverse


def _invert_packed(blocks: Array) -> Array:
    """Each ``I + block`` of a packed ``[8, C]`` inverted by forward substitution, column by column
    of L."""
    C = blocks.shape[1]
    inverse = jnp.where(tiles.packed_identity(C), 1.0, 0.0)
    position = tiles.lane(C) & (tiles.TILE - 1)
    for c in range(tiles.TILE - 1):
        column = _over_block(jnp.where(position == c, blocks, 0.0))
        inverse = inverse - column * inverse[c : c + 1]
    return inverse


def _over_block(x: Array) -> Array:
    """One nonzero lane in each eight, copied to all eight."""
    C = x.shape[1]
    if C < LANES:
        x = jnp.concatenate([x, jnp.zeros((tiles.TILE, LANES - C), x.dtype)], axis=1)
    at = tiles.lane(x.shape[1])
    for s in tiles.small_levels():
        x = x + jnp.where(at & s != 0, tiles.rotate_lanes(x, s), tiles.rotate_lanes(x, -s))
    return x[:, :C]
