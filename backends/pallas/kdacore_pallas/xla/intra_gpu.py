"""Interactions of a chunk for GPUs: 16-bit operands, decays as differences of one cumulative sum.

A pair (row i, earlier row j) farther apart than a leaf of ``LEAF`` rows meets at one level of a
binary tree over the chunk's rows, i in the right half and j in the left half of a block of ``2 s``
rows. With ``c`` the sum of log decays from the chunk's start and ``a`` that sum at the last row of
the left half, its decay is ``exp(c_i - a) exp(a - c_j)``: exponents never above zero, from no row
after i. Inside a leaf the pairs are summed one by one.

All arrays are ``[M, R, C, ...]`` as in :mod:`.segment`; a block axis may follow R.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from kdacore_pallas.xla.intra import halves
from kdacore_pallas.xla.numerics import F32, dot

Array = Any
F16 = jnp.float16
LEAF = 4
"""Rows whose pairs are summed one by one."""
EXACT = 8
"""Blocks up to this many rows are inverted in float32: every larger one inherits their error."""
LOW_SCALE = 2048.0
"""Scales the second part of a float32 number into the range of the first."""
MIN_LOG_DECAY = -90.0
"""Log decays are clipped here: a smaller one decays a float32 state to zero, and sums keep their
precision."""


def decay_sums(twice: Array) -> Array:
    """Sums of log decays from the chunk's first row through each row, float32 ``[M, R, C, K]``.

    ``twice``: each row two times, float32 ``[M, R, C, 2, K]``; otherwise XLA would write the row
    before copying it. A product with ones on the matrix units. float32 passes through it in two
    float16 parts, together 23 bits.
    """
    M, R, C, _, K = twice.shape
    twice = jnp.maximum(twice, MIN_LOG_DECAY)
    high = lax.reduce_precision(twice, 5, 10)  # not two conversions, which XLA may drop
    is_high = jnp.arange(2).reshape(2, 1) == 0
    parts = jnp.where(is_high, high, (twice - high) * LOW_SCALE).astype(F16).reshape(M, R, 2 * C, K)
    ones = np.repeat(np.tri(C, dtype=np.float32), 2, axis=1) * np.tile([1.0, 1.0 / LOW_SCALE], C)
    # One triangle per chunk: otherwise XLA lays the sums out in another order and transposes them
    # twice.
    triangle = jnp.broadcast_to(jnp.asarray(ones, F16), (M, R, C, 2 * C))
    return jnp.einsum("mrij,mrjk->mrik", triangle, parts, preferred_element_type=F32)


class Interactions(NamedTuple):
    qk: Array
    """``[M, R, C, C]``: ``q_i . (k_j decay(j->i))``, j <= i, zero above."""
    inverse: Array
    """``[M, R, C, C]``: ``(I + diag(beta) kk)^-1 diag(beta)``."""


def _leaf_sums(q: Array, k: Array, c: Array) -> tuple[Array, Array]:
    """``q_i . (k_j decay)`` and ``k_i . (k_j decay)`` of the pairs j < i of each leaf,
    ``[M, R, C/LEAF, pairs]``."""
    i, j = np.tril_indices(LEAF, -1)

    def rows(x: Array, at: np.ndarray) -> Array:
        return x.reshape(*x.shape[:2], -1, LEAF, x.shape[-1])[:, :, :, at]

    column = rows(k, j) * jnp.exp(rows(c, i) - rows(c, j))
    return jnp.sum(rows(q, i) * column, -1), jnp.sum(rows(k, i) * column, -1)


def _square(below: Array, diagonal: Array) -> Array:
    """Leaves ``[..., LEAF, LEAF]`` of their pairs ``[..., pairs]`` and their diagonals
    ``[..., LEAF]``."""
    i, j = np.tril_indices(LEAF, -1)
    place = np.zeros((LEAF, LEAF), np.int32)
    place[i, j] = np.arange(i.size)
    whole = jnp.where(np.tri(LEAF, k=-1, dtype=bool), below[..., place], 0.0)
    return jnp.where(np.eye(LEAF, dtype=bool), diagonal[..., None], whole)


def _leaf_inverse(kk: Array, beta: Array) -> Array:
    """Pairs of ``(I + diag(beta) kk)^-1 diag(beta)``; ``kk`` ``[..., pairs]``, ``beta``
    ``[..., LEAF]``."""
    at = {(i, j): n for n, (i, j) in enumerate((i, j) for i in range(LEAF) for j in range(i))}
    b = [beta[..., i] for i in range(LEAF)]
    rows: list[list[Array]] = []
    for i in range(LEAF):
        # Row i: beta_i (e_i - sum over j < i of kk_ij row_j).
        row = []
        for column in range(i):
            s = kk[..., at[i, column]] * rows[column][column]
            for j in range(column + 1, i):
                s = s + kk[..., at[i, j]] * rows[j][column]
            row.append(-b[i] * s)
        rows.append([*row, b[i]])
    return jnp.stack([x for i, row in enumerate(rows) for x in row[:i]], -1)


def _joined(diagonal: Array, corner: Array) -> Array:
    """Join diagonal blocks ``[M, R, 2n, s, s]`` and the corners below ``[M, R, n, s, s]``:
    ``[M, R, n, 2s, 2s]``.

    By selection from broadcast blocks: XLA is slower at writing concatenations.
    """
    M, R, n, s, _ = corner.shape
    row, column = jnp.arange(2).reshape(2, 1, 1, 1), jnp.arange(2).reshape(1, 1, 2, 1)
    own = diagonal.reshape(M, R, n, 2, s, 1, s)
    below = corner.astype(diagonal.dtype).reshape(M, R, n, 1, s, 1, s)
    both = jnp.where(row == column, own, jnp.where(row > column, below, jnp.zeros((), diagonal.dtype)))
    return both.reshape(M, R, n, 2 * s, 2 * s)


def _small_product(a: Array, b: Array) -> Array:
    """``a @ b`` of small float32 blocks, written out."""
    terms = [a[..., :, n : n + 1] * b[..., n : n + 1, :] for n in range(a.shape[-1])]
    return sum(terms[1:], terms[0])


def _inverse_corner(inverse: Array, kk: Array, precision: lax.Precision) -> Array:
    """The corner below the left blocks of ``inverse`` ``[M, R, 2n, s, s]``: ``- right kk left``."""
    left, right = inverse[:, :, 0::2], inverse[:, :, 1::2]
    if kk.shape[-1] <= EXACT:
        return -_small_product(right, _small_product(kk, left))
    inner = dot("...ij,...jk->...ik", kk, left, precision).astype(kk.dtype)
    return -dot("...ij,...jk->...ik", right, inner, precision)


class Operands(NamedTuple):
    """Operands of the products, all written in one pass over q, k and the sums."""

    rows: tuple[Array, ...]
    """Level s = LEAF, 2 LEAF, ...: ``[M, R, C/2s, 2s, K]``, q and then k of the right halves since
    the left ones."""
    columns: tuple[Array, ...]
    """Level s: ``[M, R, C/2s, s, K]``, k of the left halves to their ends."""
    start_q: Array
    """``[M, R, C, K]`` q since the chunk's start; k likewise."""
    start_k: Array
    end_k: Array
    """k to the chunk's end."""


def operands(q: Array, k: Array, c: Array, half: Any) -> Operands:
    """``q``, ``k`` float32 ``[M, 1, C, K]``, ``c`` the sums; ``half`` is float16 where q and k are
    normalised."""
    M, R, C, _ = c.shape
    K = k.shape[-1]
    rows, columns = [], []
    s = LEAF
    while s < C:
        (cl, cr), (kl, kr), qr = halves(c, s), halves(k, s), halves(q, s)[1]
        anchor = c[:, :, s - 1 :: 2 * s, None]
        is_q = jnp.arange(2).reshape(2, 1, 1) == 0
        both = jnp.where(is_q, qr[:, :, :, None], kr[:, :, :, None])
        rows.append((both * jnp.exp(cr - anchor)[:, :, :, None]).astype(half).reshape(M, R, C, K))
        columns.append((kl * jnp.exp(anchor - cl)).astype(half).reshape(M, R, C // 2, K))
        s *= 2
    start, end = jnp.exp(c), jnp.exp(c[:, :, -1:] - c)
    whole = ((x * y).astype(half) for x, y in ((q, start), (k, start), (k, end)))
    # Without it XLA computes the operands of one product at a time, reading everything again for
    # each.
    made: Operands = lax.optimization_barrier(Operands(tuple(rows), tuple(columns), *whole))
    sizes = [LEAF << n for n in range(len(rows))]
    return made._replace(
        rows=tuple(x.reshape(M, R, -1, 2 * s, K) for x, s in zip(made.rows, sizes, strict=True)),
        columns=tuple(x.reshape(M, R, -1, s, K) for x, s in zip(made.columns, sizes, strict=True)),
    )


def interactions(
    q: Array,
    k: Array,
    own: Array,
    c: Array,
    beta: Array,
    made: Operands,
    half: Any,
    precision: lax.Precision,
) -> Interactions:
    """Both matrices in ``half``, which holds them where q and k are normalised: nothing then
    exceeds 2.

    ``q``, ``k`` float32 ``[M, 1, C, K]``, ``own`` ``[M, 1, C, 1]`` the products of their rows,
    ``c`` the sums, ``beta`` float32 ``[M, R, C, 1]``.
    """
    own, beta = (x.reshape(*x.shape[:2], -1, LEAF) for x in (own, beta))
    leaf_qk, leaf_kk = _leaf_sums(q, k, c)
    qk = _square(leaf_qk, own).astype(half)
    inverse = _square(_leaf_inverse(leaf_kk, beta), beta)
    for rows, columns in zip(made.rows, made.columns, strict=True):
        s = columns.shape[-2]
        exact = s <= EXACT
        corner = jnp.einsum(
            "...ik,...jk->...ij",
            rows,
            columns,
            precision=precision,
            preferred_element_type=F32 if exact else half,
        )
        inverse = inverse if exact else inverse.astype(half)
        below = _inverse_corner(inverse, corner[..., s:, :], precision)
        qk, inverse = _joined(qk, corner[..., :s, :].astype(half)), _joined(inverse, below)
    return Interactions(qk[:, :, 0], inverse[:, :, 0].astype(half))
