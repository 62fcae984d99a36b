"""The binary tree over a chunk's rows, in registers: decay factors, interaction matrices, and their backward.

Same mathematics as :mod:`kdacore_pallas.xla.intra`: every factor lies in [0, 1] and belongs to rows at or before the
row that uses it. Here each level's factors are kept as one ``[C, K]`` array: rows in a right half hold the decay
from the start of that half through the row, rows in a left half the decay after the row to that half's end.
Masked entries are dropped by select, so what they hold never matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kdacore_pallas.kernels.products import NN, NT, TN, Passes, product

Array = Any
SUBLANES = 8


def row_index(C: int, width: int) -> Array:
    """``[C, width]`` int32: the row of each element."""
    return lax.broadcasted_iota(jnp.int32, (C, width), 0)


def roll_rows(x: Array, shift: int) -> Array:
    """Rows moved down by ``shift`` (negative: up), around the end."""
    return pltpu.roll(x, shift % x.shape[0], 0)


def partner(x: Array, rows: Array, s: int) -> Array:
    """Row ``i`` holds row ``i ^ s``."""
    return jnp.where(rows & s != 0, roll_rows(x, s), roll_rows(x, -s))


class Tree(NamedTuple):
    factors: tuple[Array, ...]
    """``[C, K]`` for s = 1, 2, 4, ..."""
    prefix: Array
    """``[C, K]`` from the chunk's start through the row."""
    suffix: Array
    """``[C, K]`` after the row to the chunk's end."""
    total: Array
    """``[C, K]``, every row the decay of the whole chunk."""


def levels(C: int) -> Iterator[int]:
    s = 1
    while s < C:
        yield s
        s *= 2


def decay_tree(g: Array) -> Tree:
    """Factors from log decays ``g`` ``[C, K]``: one exponential an element, then products."""
    rows = row_index(*g.shape)
    prefix = total = jnp.exp(g)
    suffix = jnp.ones_like(prefix)
    factors = []
    for s in levels(g.shape[0]):
        right = rows & s != 0
        factors.append(jnp.where(right, prefix, suffix))
        before, after = roll_rows(total, s), roll_rows(total, -s)
        prefix = jnp.where(right, prefix * before, prefix)
        suffix = jnp.where(right, suffix, suffix * after)
        total = total * jnp.where(right, before, after)
    return Tree(tuple(factors), prefix, suffix, total)


def pair_mask(shape: tuple[int, int], s: int) -> Array:
    """Pairs (row, column) that meet at level ``s``; rows count modulo the number of columns."""
    i = lax.broadcasted_iota(jnp.int32, shape, 0) & (shape[1] - 1)
    j = lax.broadcasted_iota(jnp.int32, shape, 1)
    # The highest bit in which they differ is s, and it is the row that has it.
    return ((i ^ j) < 2 * s) & ((i ^ j) >= s) & (i > j)


def interactions(q: Array, k: Array, tree: Tree, passes: Passes) -> tuple[Array, Array]:
    """``[C, C]``: ``q_i . (k_j decay)`` for j <= i, and ``k_i . (k_j decay)`` for j < i; zero elsewhere."""
    C = q.shape[0]
    both = jnp.zeros((2 * C, C), jnp.float32)
    for s, factor in zip(levels(C), tree.factors, strict=True):
        xq, xk = q * factor, k * factor
        if s < SUBLANES:
            found = product(jnp.concatenate([xq, xk], axis=0), xk, NT, passes)
        else:
            found = _right_rows_only(xq, xk, s, passes)
        both = jnp.where(pair_mask(both.shape, s), found, both)
    i, j = row_index(C, C), lax.broadcasted_iota(jnp.int32, (C, C), 1)
    own = jnp.sum(q * k, axis=1, keepdims=True)
    return jnp.where(i == j, own, both[:C]), both[C:]


def _right_rows_only(xq: Array, xk: Array, s: int, passes: Passes) -> Array:
    """Half the work where a half block is whole registers: left rows have no pair to the left of them here."""
    C, K = xq.shape
    right = [x.reshape(C // (2 * s), 2, s, K)[:, 1].reshape(C // 2, K) for x in (xq, xk)]
    found = product(jnp.concatenate(right, axis=0), xk, NT, passes)
    spread = found.reshape(2 * C // (2 * s), 1, s, C)
    return jnp.concatenate([spread, spread], axis=1).reshape(2 * C, C)


class TreeGrads(NamedTuple):
    q: Array
    k: Array
    g: Array


def _other_half(x: Array, rows: Array, s: int) -> Array:
    """Every row: the sum of ``x`` over the other half of its block of ``2 s`` rows."""
    C, K = x.shape
    if s >= SUBLANES:
        halves = jnp.sum(x.reshape(C // (2 * s), 2, s, K), axis=2, keepdims=True)
        swapped = jnp.concatenate([halves[:, 1:], halves[:, :1]], axis=1)
        return jnp.broadcast_to(swapped, (C // (2 * s), 2, s, K)).reshape(C, K)
    step = 1
    while step < s:
        x = x + partner(x, rows, step)
        step *= 2
    return partner(x, rows, s)


def tree_backward(
    q: Array,
    k: Array,
    tree: Tree,
    dqk: Array,
    dkk: Array,
    dprefix: Array,
    dsuffix: Array,
    dtotal: Array,
    passes: Passes,
) -> TreeGrads:
    """Backward of :func:`interactions` and :func:`decay_tree`.

    ``dprefix``, ``dsuffix`` ``[C, K]`` and ``dtotal`` ``[1, K]`` are gradients of the logarithms. Going down the
    tree, ``inclusive`` holds what each row's log prefix still owes to the rows up to it in its block, ``exclusive``
    what its log suffix owes to the rows after it; at each split one half's sum is paid to the other half.
    """
    C, K = q.shape
    rows = row_index(C, K)
    own = jnp.sum(jnp.where(row_index(C, C) == lax.broadcasted_iota(jnp.int32, (C, C), 1), dqk, 0.0), 1, keepdims=True)
    dq, dk = own * k, own * q
    inclusive, exclusive, paid = dprefix, dsuffix, jnp.broadcast_to(dtotal, (C, K))
    for s, factor in reversed(list(zip(levels(C), tree.factors, strict=True))):
        mask = pair_mask((C, C), s)
        d = jnp.concatenate([jnp.where(mask, dqk, 0.0), jnp.where(mask, dkk, 0.0)], axis=0)
        xq, xk = q * factor, k * factor
        drows = product(d, xk, NN, passes)
        dcolumns = product(d, jnp.concatenate([xq, xk], axis=0), TN, passes)
        dxq, dxk = drows[:C], drows[C:] + dcolumns
        dq, dk = dq + dxq * factor, dk + dxk * factor
        right = rows & s != 0
        paid = paid + jnp.where(right, _other_half(exclusive, rows, s), _other_half(inclusive, rows, s))
        at = xq * dxq + xk * dxk
        inclusive = inclusive + jnp.where(right, at, 0.0)
        exclusive = exclusive + jnp.where(right, 0.0, at)
    return TreeGrads(dq, dk, paid + inclusive)
