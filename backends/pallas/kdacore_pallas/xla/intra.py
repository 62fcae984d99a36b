"""Within a chunk: decays, interaction matrices, the triangular inverse; and their backward.

A pair (row i, earlier row j) meets at exactly one level of a binary tree over the chunk's rows: i
in the right half, j in the left half of a block of ``2 s`` rows. There its decay is the product
``exp(sum of g from the first row of the right half to i) * exp(sum of g after j to the end of the left half)``:
two factors in [0, 1], whatever the gate, neither of which reads a row after i. The factors of one
level follow from those of the level below by per-channel products with the decay of a whole half,
and no difference of cumulative sums is ever taken. The inverse of ``I + L`` follows the same tree:
exact block substitution, never a power of ``L``.

All arrays have leading batch axes, then ``C`` rows, then channels (one channel for a scalar gate).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore_pallas.xla.numerics import dot, total

Array = Any


class Decays(NamedTuple):
    """Decay factors of a chunk, each in [0, 1]."""

    prefix: Array
    """``[..., C, K]`` from the chunk's start through the row."""
    suffix: Array
    """``[..., C, K]`` after the row, to the chunk's end."""
    total: Array
    """``[..., 1, K]`` of the whole chunk."""
    row: Array
    """``[..., C, K]`` of each row alone."""
    right: tuple[Array, ...]
    """Level s = 1, 2, 4, ...: ``[..., C/2s, s, K]`` from the start of the right half through the
    row."""
    left: tuple[Array, ...]
    """Level s: ``[..., C/2s, s, K]`` after the row, to the end of the left half."""


def decays(g: Array) -> Decays:
    """Factors from the log decay ``g`` ``[..., C, K]``."""
    C = g.shape[-2]
    sums = g[..., :, None, :]
    block = jnp.exp(sums)
    row = block[..., 0, :]
    prefix, suffix = block, jnp.ones_like(block)
    right, left = [], []
    s = 1
    while s < C:
        right.append(_pair(prefix)[1])
        left.append(_pair(suffix)[0])
        first, second = _pair(block)
        one = jnp.ones_like(first)
        prefix, suffix = _doubled(prefix, one, first), _doubled(suffix, second, one)
        # Not the product of both: a CPU would fuse that tree of products into every reader of every
        # level.
        sums = sum(_pair(sums))
        block = jnp.exp(sums)
        s *= 2
    return Decays(
        prefix[..., 0, :, :], suffix[..., 0, :, :], block[..., 0, :, :], row, tuple(right), tuple(left)
    )


def _doubled(x: Array, left: Array, right: Array) -> Array:
    """Blocks ``[..., 2n, s, K]`` as ``[..., n, 2s, K]``, left and right halves times a row
    ``[..., n, 1, K]`` each.

    Products with small arrays rather than a concatenation of large ones, which would have to be
    written.
    """
    pairs = x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:])
    pairs = pairs * jnp.stack([left, right], -3)
    return pairs.reshape(*x.shape[:-3], x.shape[-3] // 2, 2 * x.shape[-2], x.shape[-1])


def halves(x: Array, s: int) -> tuple[Array, Array]:
    """Left and right halves of the blocks of ``2 s`` rows: two ``[..., C/2s, s, K]``."""
    blocks = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * s), 2, s, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _pair(blocks: Array) -> tuple[Array, Array]:
    """Left and right blocks of ``[..., n, s, s]``."""
    return blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]


def _lower(left: Array, corner: Array, right: Array) -> Array:
    """``[[left, 0], [corner, right]]``."""
    top = jnp.concatenate([left, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, right], axis=-1)], axis=-2)


class Interactions(NamedTuple):
    """``[..., C, C]`` each, zero above the diagonal."""

    qk: Array
    """``q_i . (k_j decay(j->i))``, j <= i."""
    kk: Array
    """``k_i . (k_j decay(j->i))``, j < i."""
    inverse: Array
    """``(I + diag(beta) kk)^-1``."""


def interactions(q: Array, k: Array, beta: Array, decay: Decays, precision: lax.Precision) -> Interactions:
    """The three matrices of each chunk. ``q``, ``k`` ``[..., C, K]``; ``beta`` ``[..., C, 1]``."""
    batch = decay.prefix.shape[:-2]
    qk = total(q * k, -1)[..., None]
    qk = jnp.broadcast_to(qk, (*batch, *qk.shape[-3:]))
    kk = jnp.zeros_like(qk)
    inverse = jnp.ones_like(qk)
    s = 1
    for right, left in zip(decay.right, decay.left, strict=True):
        rows = jnp.concatenate([halves(q, s)[1] * right, halves(k, s)[1] * right], axis=-2)
        corner = dot("...ik,...jk->...ij", rows, halves(k, s)[0] * left, precision)
        corner_qk, corner_kk = corner[..., :s, :], corner[..., s:, :]
        (ql, qr), (kl, kr), (il, ir) = _pair(qk), _pair(kk), _pair(inverse)
        qk, kk = _lower(ql, corner_qk, qr), _lower(kl, corner_kk, kr)
        inverse = _lower(il, _inverse_corner(il, halves(beta, s)[1] * corner_kk, ir, precision), ir)
        s *= 2
    return Interactions(qk[..., 0, :, :], kk[..., 0, :, :], inverse[..., 0, :, :])


def packed(pair: Interactions) -> tuple[Array, Array]:
    """The three in two: ``kk`` lies above the diagonal of ``qk``."""
    return pair.qk + jnp.swapaxes(pair.kk, -1, -2), pair.inverse


def unpacked(both: Array, inverse: Array) -> Interactions:
    """The reverse of :func:`packed`."""
    return Interactions(jnp.tril(both), jnp.swapaxes(jnp.triu(both, 1), -1, -2), inverse)


def _inverse_corner(il: Array, corner: Array, ir: Array, precision: lax.Precision) -> Array:
    s = corner.shape[-1]
    if s == 1:
        return -corner
    if s <= SMALL:
        return -small_product(ir, small_product(corner, il))
    # Small blocks are cheap and every larger one inherits their error: full float32 there.
    precision = lax.Precision.HIGHEST if s <= 8 else precision
    return -dot("...ij,...jk->...ik", ir, dot("...ij,...jk->...ik", corner, il, precision), precision)


SMALL = 4
"""Blocks of up to this many rows are multiplied elementwise: calling a library would take longer.
"""


def small_product(a: Array, b: Array) -> Array:
    """``a @ b`` of tiny float32 blocks as products and sums."""
    return jnp.sum(a[..., :, :, None] * b[..., None, :, :], -2)


class IntraGrads(NamedTuple):
    q: Array
    k: Array
    g: Array


def interactions_backward(
    q: Array,
    k: Array,
    decay: Decays,
    dqk: Array,
    dkk: Array,
    dprefix: Array,
    dsuffix: Array,
    dtotal: Array,
    precision: lax.Precision,
) -> IntraGrads:
    """Backward of :func:`interactions` (not of its inverse) and of :func:`decays`.

    ``dqk`` and ``dkk`` are the gradients of ``qk`` and ``kk``; ``dprefix``, ``dsuffix`` and
    ``dtotal`` those of the *logarithms* of the chunk's decay factors. The tree is traversed from
    the top: a gradient of a block's log prefix is one of its halves' prefixes and totals. There are
    only sums, so nothing cancels.
    """
    C = q.shape[-2]
    scalar = decay.prefix.shape[-1] == 1

    def channels(x: Array) -> Array:
        return total(x, -1) if scalar else x

    dqk, dkk = dqk[..., None, :, :], dkk[..., None, :, :]
    dp, ds, dt = dprefix[..., None, :, :], dsuffix[..., None, :, :], dtotal[..., None, :, :]
    found = []
    s = C // 2
    for right, left in zip(decay.right[:DEPTH:-1], decay.left[:DEPTH:-1], strict=True):
        (_, qr), (kl, kr) = halves(q, s), halves(k, s)
        d = jnp.concatenate([dqk[..., s:, :s], dkk[..., s:, :s]], axis=-2)
        rows = jnp.concatenate([qr * right, kr * right], axis=-2)
        columns = kl * left
        drows = dot("...ij,...jk->...ik", d, columns, precision)
        dcolumns = dot("...ij,...ik->...jk", d, rows, precision)
        dqr, dkr, dkl = drows[..., :s, :] * right, drows[..., s:, :] * right, dcolumns * left
        found.append((dqr, dkl, dkr))
        dqk, dkk = _diagonal_blocks(dqk, s), _diagonal_blocks(dkk, s)
        dp, ds, dt = _split(dp, ds, dt, channels(qr * dqr + kr * dkr), channels(kl * dkl))
        s //= 2
    dq, dk, dg = _leaves(q, k, decay, dqk, dkk)
    for dqr, dkl, dkr in found:
        dq, dk = _add_halves(dq, None, dqr), _add_halves(dk, dkl, dkr)
    return IntraGrads(dq, dk, channels(dg) + _rows_of(dp, ds, dt))


LEAF = 4
"""Rows of blocks whose pairs are computed one by one: a level costs the same however small its
blocks."""
DEPTH = LEAF.bit_length() - 2
"""The last level inside them."""


def _leaves(q: Array, k: Array, decay: Decays, dqk: Array, dkk: Array) -> IntraGrads:
    """Gradients of the pairs inside blocks of ``LEAF`` rows, the diagonal too. ``dqk``, ``dkk``
    ``[..., C/LEAF, LEAF, LEAF]``."""

    def rows(x: Array) -> list[Array]:
        blocks = x.reshape(*x.shape[:-2], -1, LEAF, x.shape[-1])
        return [blocks[..., n, :] for n in range(LEAF)]

    qs, ks, es = rows(q), rows(k), rows(decay.row)
    at = {(i, j): (dqk[..., i, j, None], dkk[..., i, j, None]) for i in range(LEAF) for j in range(i + 1)}
    dq = [at[i, i][0] * ks[i] for i in range(LEAF)]
    dk = [at[i, i][0] * qs[i] for i in range(LEAF)]
    dg: list[Any] = [0.0] * LEAF
    for i in range(LEAF):
        decayed = None
        for j in reversed(range(i)):
            decayed = es[j + 1] if decayed is None else decayed * es[j + 1]
            dqk_, dkk_ = at[i, j]
            column = ks[j] * decayed
            row = dqk_ * qs[i] + dkk_ * ks[i]
            dq[i] += dqk_ * column
            dk[i] += dkk_ * column
            dk[j] += row * decayed
            for m in range(j + 1, i + 1):
                dg[m] += row * column
    dg[0] = jnp.zeros_like(dg[1])
    return IntraGrads(*map(_from_rows, (dq, dk, dg)))


def _from_rows(rows: list[Array]) -> Array:
    """``LEAF`` arrays ``[..., C/LEAF, K]``, each with one row of every block, as ``[..., C, K]``."""
    x = jnp.stack(rows, -2)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _rows_of(dp: Array, ds: Array, dt: Array) -> Array:
    """Gradients of each row's log decay from those of a leaf's log prefixes, suffixes and total."""
    found = []
    for m in range(LEAF):
        parts = [dt[..., 0, :], *(dp[..., i, :] for i in range(m, LEAF)), *(ds[..., j, :] for j in range(m))]
        found.append(sum(parts[1:], parts[0]))
    return _from_rows(found)


def _add_halves(x: Array, left: Array | None, right: Array) -> Array:
    left = jnp.zeros_like(right) if left is None else left
    return x + jnp.stack([left, right], axis=-3).reshape(x.shape)


def _interleave(left: Array, right: Array) -> Array:
    """Two ``[..., n, a, b]`` as ``[..., 2n, a, b]``, left and right alternating."""
    x = jnp.stack([left, right], axis=-3)
    return x.reshape(*x.shape[:-4], 2 * x.shape[-4], *x.shape[-2:])


def _diagonal_blocks(x: Array, s: int) -> Array:
    return _interleave(x[..., :s, :s], x[..., s:, s:])


def _split(dp: Array, ds: Array, dt: Array, at_right: Array, at_left: Array) -> tuple[Array, Array, Array]:
    """Gradients of a block's log prefix, suffix and total, distributed to its halves, plus those of
    this level."""
    s = at_right.shape[-2]
    pl, pr, sl, sr = dp[..., :s, :], dp[..., s:, :], ds[..., :s, :], ds[..., s:, :]
    tl = dt + total(pr, -2)
    tr = dt + total(sl, -2)
    return _interleave(pl, pr + at_right), _interleave(sl + at_left, sr), _interleave(tl, tr)
