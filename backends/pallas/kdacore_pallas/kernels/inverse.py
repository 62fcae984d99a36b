"""``(I + L)^-1`` of a strictly lower triangular ``L`` ``[C, C]``: exact block substitution, two ways.

Both join halves as ``[[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]``: nothing but inverses of diagonal
blocks is ever formed, so near-collinear keys (entries of ``L`` near one) lose no accuracy.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kdacore_pallas.kernels.levels import SUBLANES, levels, pair_mask
from kdacore_pallas.kernels.products import NN, Passes, product

Array = Any
BLOCK = SUBLANES
LANES = 128


def by_merging(L: Array, passes: Passes) -> Array:
    """Every level of the tree on the matrix unit."""
    C = L.shape[0]
    i, j = (lax.broadcasted_iota(jnp.int32, (C, C), a) for a in (0, 1))
    inverse = jnp.where(i == j, 1.0, jnp.where(pair_mask((C, C), 1), -L, 0.0))
    for s in levels(C):
        if s > 1:
            inverse = _merge(inverse, L, s, passes)
    return inverse


def by_substitution(L: Array, passes: Passes) -> Array:
    """Blocks of 8 rows by forward substitution, all of them side by side in one register row; then merging."""
    C = L.shape[0]
    inverse = _spread(_invert_blocks(_gather(L)), C)
    for s in levels(C):
        if s >= BLOCK:
            inverse = _merge(inverse, L, s, passes)
    return inverse


def _merge(inverse: Array, L: Array, s: int, passes: Passes) -> Array:
    """From blocks of ``s`` to blocks of ``2 s``. ``inverse`` is block diagonal, identity included."""
    C = L.shape[0]
    corner = jnp.where(pair_mask((C, C), s), L, 0.0)
    if s < SUBLANES:
        return inverse - product(inverse, product(corner, inverse, NN, passes), NN, passes)
    # Left rows do not change: work on the right ones.
    shape = (C // (2 * s), 2, s, C)
    corner = corner.reshape(shape)[:, 1].reshape(C // 2, C)
    below = inverse.reshape(shape)[:, 1].reshape(C // 2, C)
    inner = product(corner, inverse, NN, passes).reshape(C // (2 * s), 1, s, C)
    inner = jnp.concatenate([jnp.zeros_like(inner), inner], axis=1).reshape(C, C)
    change = product(below, inner, NN, passes).reshape(C // (2 * s), 1, s, C)
    return inverse - jnp.concatenate([jnp.zeros_like(change), change], axis=1).reshape(C, C)


def _gather(L: Array) -> Array:
    """Diagonal blocks side by side: ``[8, C]``, block b in lanes ``8 b ... 8 b + 7``."""
    C = L.shape[0]
    lane = lax.broadcasted_iota(jnp.int32, (BLOCK, C), 1)
    blocks = jnp.zeros((BLOCK, C), jnp.float32)
    for b in range(C // BLOCK):
        blocks = jnp.where(lane // BLOCK == b, L[b * BLOCK : (b + 1) * BLOCK], blocks)
    return blocks


def _spread(blocks: Array, C: int) -> Array:
    """The reverse of :func:`_gather`: a block diagonal ``[C, C]``."""
    lane = lax.broadcasted_iota(jnp.int32, (BLOCK, C), 1)
    rows = [jnp.where(lane // BLOCK == b, blocks, 0.0) for b in range(C // BLOCK)]
    return jnp.concatenate(rows, axis=0)


def _invert_blocks(blocks: Array) -> Array:
    """Each ``I + block`` inverted by forward substitution, column by column of L."""
    lane = lax.broadcasted_iota(jnp.int32, blocks.shape, 1)
    row = lax.broadcasted_iota(jnp.int32, blocks.shape, 0)
    inverse = jnp.where(lane % BLOCK == row, 1.0, 0.0)
    for c in range(BLOCK - 1):
        column = jnp.where(lane % BLOCK == c, blocks, 0.0)
        inverse = inverse - _over_block(column, lane) * inverse[c : c + 1]
    return inverse


def _over_block(x: Array, lane: Array) -> Array:
    """One nonzero lane per block of 8, copied to all eight."""
    for s in (1, 2, 4):
        up, down = pltpu.roll(x, s, 1), pltpu.roll(x, x.shape[1] - s, 1)
        x = x + jnp.where(lane & s != 0, up, down)
    return x
