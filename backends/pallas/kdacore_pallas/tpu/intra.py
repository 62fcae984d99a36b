"""The binary tree over a chunk's rows, in registers: decay factors and interaction matrices.

Same mathematics as :mod:`kdacore_pallas.xla.intra`: every factor lies in [0, 1] and belongs to rows
at or before the row that uses it. Here each level's factors are one ``[C, K]`` array: rows in a
right half hold the decay from the start of that half through the row, rows in a left half the decay
after the row to that half's end. Entries that are no pair are masked out, so their values never
matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from kdacore_pallas.tpu import tiles
from kdacore_pallas.tpu.products import NT, Passes, product

Array = Any


class Tree(NamedTuple):
    factors: tuple[Array, ...]
    """``[C, K]`` for s = 1, 2, 4, ..."""
    prefix: Array
    """``[C, K]`` from the chunk's start through the row."""
    suffix: Array
    """``[C, K]`` after the row to the chunk's end."""
    total: Array
    """``[8, K]``, every row the decay of the whole chunk."""


def decay_tree(g: Array) -> Tree:
    """Factors from log decays ``g`` ``[C, K]``: one exponential per element, then products."""
    C, K = g.shape
    prefix = total = jnp.exp(tiles.as_tiles(g))
    suffix = jnp.ones_like(prefix)
    factors = []
    for s in tiles.small_levels():
        right = tiles.sublane(K) & s != 0
        factors.append(jnp.where(right, prefix, suffix).reshape(C, K))
        before, after = tiles.rotate(total, s), tiles.rotate(total, -s)
        prefix = jnp.where(right, prefix * before, prefix)
        suffix = jnp.where(right, suffix, suffix * after)
        total = total * jnp.where(right, before, after)
    prefix, suffix = prefix.reshape(C, K), suffix.reshape(C, K)
    for s in tiles.big_levels(C):
        (pl, pr), (sl, sr) = tiles.halves(prefix, s), tiles.halves(suffix, s)
        factors.append(tiles.join(sl, pr, s))
        pairs = total.reshape(C // (2 * s), 2, tiles.TILE, K)
        left, right = pairs[:, 0], pairs[:, 1]
        prefix = tiles.join(pl, tiles.each_block(pr, left, s), s)
        suffix = tiles.join(tiles.each_block(sl, right, s), sr, s)
        total = left * right
    return Tree(tuple(factors), prefix, suffix, total.reshape(tiles.TILE, K))


def interactions(q: Array, k: Array, tree: Tree, passes: Passes) -> tuple[Array, Array]:
    """``[C, C]``: ``q_i . (k_j decay)`` for j <= i, and ``k_i . (k_j decay)`` for j < i; zero
    elsewhere."""
    C = q.shape[0]
    near_qk, near_kk = _within_tiles(q, k, tree, passes)
    qk, kk = tiles.unpack_diagonal(near_qk), tiles.unpack_diagonal(near_kk)
    for s, factor in zip(tiles.big_levels(C), tree.factors[3:], strict=True):
        xk = k * factor
        _, right = tiles.halves(xk, s)
        xq = tiles.halves(q, s)[1] * tiles.halves(factor, s)[1]
        found = product(jnp.concatenate([xq, right], axis=0), xk, NT, passes)
        pairs = tiles.left_lanes(C, s)
        (ql, qr), (kl, kr) = tiles.halves(qk, s), tiles.halves(kk, s)
        qk = tiles.join(ql, jnp.where(pairs, found[: C // 2], qr), s)
        kk = tiles.join(kl, jnp.where(pairs, found[C // 2 :], kr), s)
    return qk, kk


def _within_tiles(q: Array, k: Array, tree: Tree, passes: Passes) -> tuple[Array, Array]:
    """The 8 x 8 diagonal blocks of both matrices, packed ``[8, C]``."""
    C = q.shape[0]
    own = jnp.broadcast_to(jnp.sum(q * k, axis=1, keepdims=True), (C, C))
    qk = jnp.where(tiles.packed_identity(C), tiles.pack_diagonal(own), 0.0)
    kk = jnp.zeros_like(qk)
    for s, factor in zip(tiles.small_levels(), tree.factors[:3], strict=True):
        xk = k * factor
        found = product(jnp.concatenate([q * factor, xk], axis=0), xk, NT, passes)
        pairs = tiles.small_pairs(C, s)
        qk = jnp.where(pairs, tiles.pack_diagonal(found[:C]), qk)
        kk = jnp.where(pairs, tiles.pack_diagonal(found[C:]), kk)
    return qk, kk
