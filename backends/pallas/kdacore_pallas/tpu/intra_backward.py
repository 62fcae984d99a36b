"""Gradients of :mod:`kdacore_pallas.tpu.intra`, traversing the tree from the top."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from kdacore_pallas.tpu import tiles
from kdacore_pallas.tpu.intra import Tree
from kdacore_pallas.tpu.products import NN, TN, Passes, product

Array = Any


class TreeGrads(NamedTuple):
    """Accumulated gradients. Those of log decays are in three parts, until blocks are single rows.

    ``inclusive`` is the gradient of each row's log prefix, which belongs to the rows of its block
    up to it; ``exclusive`` that of its log suffix, which belongs to the rows after it. When a block
    splits, the sum over one half is added to ``final`` of every row of the other. Nothing is ever
    subtracted, so nothing cancels.
    """

    q: Array
    k: Array
    inclusive: Array
    exclusive: Array
    final: Array


def tree_backward(
    q: Array, k: Array, tree: Tree, dqk: Array, dkk: Array, start: TreeGrads, passes: Passes
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and g (log decay), all ``[C, K]``.

    ``dqk`` and ``dkk`` ``[C, C]`` are zero above the diagonal. ``start`` holds the gradients from
    outside the tree: of q and k directly, and of the logarithms of the chunk's prefix
    (``inclusive``), suffix (``exclusive``) and total (``final``).
    """
    C = q.shape[0]
    identity = tiles.unpack_diagonal(jnp.where(tiles.packed_identity(C), 1.0, 0.0))
    own = jnp.sum(identity * dqk, axis=1, keepdims=True)
    grads = start._replace(q=start.q + own * k, k=start.k + own * q)
    for s, factor in reversed(list(zip(tiles.big_levels(C), tree.factors[3:], strict=True))):
        grads = _big_level(q, k, factor, dqk, dkk, grads, s, passes)
    near_qk, near_kk = tiles.pack_diagonal(dqk), tiles.pack_diagonal(dkk)
    for s, factor in reversed(list(zip(tiles.small_levels(), tree.factors[:3], strict=True))):
        grads = _small_level(q, k, factor, near_qk, near_kk, grads, s, passes)
    return grads.q, grads.k, grads.final + grads.inclusive


def _block_sum(x: Array, s: int) -> Array:
    """Every row: the sum over its block of ``s`` rows (s >= 8)."""
    rows, width = x.shape
    blocks = x.reshape(rows // s, s, width)
    return jnp.broadcast_to(jnp.sum(blocks, axis=1, keepdims=True), blocks.shape).reshape(rows, width)


def _big_level(
    q: Array, k: Array, factor: Array, dqk: Array, dkk: Array, grads: TreeGrads, s: int, passes: Passes
) -> TreeGrads:
    """Half blocks of whole tiles: only rows of right halves pair with columns."""
    C = q.shape[0]
    (fl, fr), (kl, kr) = tiles.halves(factor, s), tiles.halves(k, s)
    xq, xl, xr = tiles.halves(q, s)[1] * fr, kl * fl, kr * fr
    pairs = tiles.left_lanes(C, s)
    d = [jnp.where(pairs, tiles.halves(m, s)[1], 0.0) for m in (dqk, dkk)]
    both = jnp.concatenate(d, axis=0)
    drows = product(both, tiles.join(xl, xr, s), NN, passes)
    dcolumns = product(both, jnp.concatenate([xq, xr], axis=0), TN, passes)
    dxq, dxr, dxl = drows[: C // 2], drows[C // 2 :], tiles.halves(dcolumns, s)[0]
    (ql, qr), (gl, gr) = tiles.halves(grads.q, s), tiles.halves(grads.k, s)
    (il, ir), (el, er) = tiles.halves(grads.inclusive, s), tiles.halves(grads.exclusive, s)
    pl, pr = tiles.halves(grads.final, s)
    return TreeGrads(
        q=tiles.join(ql, qr + dxq * fr, s),
        k=tiles.join(gl + dxl * fl, gr + dxr * fr, s),
        inclusive=tiles.join(il, ir + xq * dxq + xr * dxr, s),
        exclusive=tiles.join(el + xl * dxl, er, s),
        final=tiles.join(pl + _block_sum(ir, s), pr + _block_sum(el, s), s),
    )


def _other_half(x: Array, s: int) -> Array:
    """Every row of ``[C / 8, 8, K]``: the sum over the other half of its block of ``2 s`` rows (s <
    8)."""
    rows = tiles.sublane(x.shape[-1])
    step = 1
    while step <= s:
        other = jnp.where(rows & step != 0, tiles.rotate(x, step), tiles.rotate(x, -step))
        x = other if step == s else x + other
        step *= 2
    return x


def _small_level(
    q: Array,
    k: Array,
    factor: Array,
    near_qk: Array,
    near_kk: Array,
    grads: TreeGrads,
    s: int,
    passes: Passes,
) -> TreeGrads:
    """Half blocks within a tile."""
    C, K = q.shape
    pairs = tiles.small_pairs(C, s)
    d = [tiles.unpack_diagonal(jnp.where(pairs, m, 0.0)) for m in (near_qk, near_kk)]
    both = jnp.concatenate(d, axis=0)
    xq, xk = q * factor, k * factor
    drows = product(both, xk, NN, passes)
    dcolumns = product(both, jnp.concatenate([xq, xk], axis=0), TN, passes)
    dxq, dxk = drows[:C], drows[C:] + dcolumns
    right = tiles.sublane(K) & s != 0
    at = tiles.as_tiles(xq * dxq + xk * dxk)
    inclusive, exclusive = tiles.as_tiles(grads.inclusive), tiles.as_tiles(grads.exclusive)
    received = jnp.where(right, _other_half(exclusive, s), _other_half(inclusive, s))
    return TreeGrads(
        q=grads.q + dxq * factor,
        k=grads.k + dxk * factor,
        inclusive=(inclusive + jnp.where(right, at, 0.0)).reshape(C, K),
        exclusive=(exclusive + jnp.where(right, 0.0, at)).reshape(C, K),
        final=grads.final + received.reshape(C, K),
    )
