"""Inside a chunk: decayed products of q and k and the inverse of a unit lower triangular matrix, with their gradients.

For rows j < i of a chunk the product of ``k_j`` with ``k_i`` or ``q_i`` carries the decay of rows j+1..i, per channel.
Neighbouring blocks of s = 1, 2, 4, ... rows are joined: for a pair of blocks (left, right)

    decay(j -> i) = decay(j -> end of left) * decay(start of right -> i)

so both factors are products of true decays, at most 1, and depend on no row after i. Rows and columns already carry
their factor for block size s when level s begins; joining multiplies them by the other block's total. Nothing is
subtracted, in the exponents or in the gradients, so gates of -60 next to gates of 0 lose no digits.

Columns are the keys times beta, rows the queries and the negated keys. With ``P`` the decayed products of key rows with
earlier columns, strictly lower triangular, ``(I - P)^-1`` is built block by block too: where its blocks ``A1`` and
``A2`` join, the lower left is ``A2 P A1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array
from kdacore_reference.arrays import beside, compiled_for_jax, multiply_at, put


class Level(NamedTuple):
    """Joining blocks of ``s`` rows, ``b`` pairs of them in a chunk."""

    rows_right: Array
    """``[n, H, G, b, s, 2, K]``: rows, of keys (0) and queries (1), of right blocks, decayed from the block's start."""
    columns_left: Array
    """``[n, H, G, b, s, K]``: columns of left blocks, decayed to the block's end."""
    total_left: Array
    total_right: Array
    """``[n, H, G, b, 1, K]``: decay over a whole block."""


class Intra(NamedTuple):
    """What the forward needs of a chunk."""

    start: Array
    """``[n, H, G, C, 2, K]``: rows, of keys (0) and queries (1), decayed from the chunk's start."""
    end: Array
    """``[n, H, G, C, K]``: columns decayed to the chunk's end."""
    total: Array
    """``[n, H, G, K or 1]``: decay over the chunk."""
    inverse: Array
    """``[n, H, G, C, C]``: of ``I - P``."""
    qk: Array
    """``[n, H, G, C, C]``: queries with columns j <= i, else 0."""


class Carried(NamedTuple):
    """What the backward needs of a chunk, whose two matrices the forward saved."""

    start: Array
    end: Array
    total: Array
    levels: tuple[Level, ...]


FEW = 4
"""Columns up to which a product is made of dot products: OpenBLAS takes a lock for every product, however small, which
costs two threads more than the product itself."""

RIGHT = (..., 1, slice(None), slice(None))
LEFT = (..., 0, slice(None), slice(None))
RIGHT_KQ = (*RIGHT, slice(None))


@compiled_for_jax()
def interact(kq: Array, columns: Array, decay: Array) -> Intra:
    """All that a chunk computes before it meets a state.

    Args:
        kq: ``[n, H, 1 or G, C, 2, K]``, rows: negated keys and queries; C a power of two, at least 2. Overwritten.
        columns: ``[n, H, G, C, K]``, keys times beta; overwritten.
        decay: ``exp(g)``, ``[n, H, G, C, K]``, or ``[n, H, G, C, 1]`` with a scalar gate.
    """
    blocks = _single_rows(kq, columns)
    factor = decay[..., None, :]
    if kq.shape[2] == decay.shape[2]:
        kq *= factor
    else:
        kq = kq * factor
    carry = _Carry(kq, columns, decay)
    for level in carry.levels():
        blocks = _join(blocks, _products(level.rows_right, level.columns_left))
    return Intra(*carry.result(), blocks[..., 0, 0, :, :], blocks[..., 0, 1, :, :])


@compiled_for_jax()
def carry_and_keep(kq: Array, columns: Array, decay: Array) -> Carried:
    """Rows and columns carried as in :func:`interact`, and every level's for its gradients."""
    xp = array_namespace(kq)
    carry = _Carry(kq * decay[..., None, :], columns, decay)
    levels = [
        Level(xp.asarray(level.rows_right, copy=True), xp.asarray(level.columns_left, copy=True), *level[2:])
        for level in carry.levels()
    ]
    return Carried(*carry.result(), tuple(levels))


class _Carry:
    """Rows and columns on their way from single rows to the whole chunk."""

    def __init__(self, start: Array, end: Array, decay: Array) -> None:
        """Of single rows: ``start`` has its own decay, ``end`` none. Both are overwritten."""
        self.shape = end.shape
        self.start = start
        self.end = end
        self.total = decay

    def levels(self) -> Iterator[Level]:
        """Yields each level's views before it is joined: use them, or copy them, before asking for the next."""
        n, H, G, C, K = self.shape
        xp = array_namespace(self.start)
        s = 1
        while s < C:
            b = C // (2 * s)
            start = xp.reshape(self.start, (n, H, G, b, 2, s, 2, K))
            end = xp.reshape(self.end, (n, H, G, b, 2, s, K))
            pairs = xp.reshape(self.total, (n, H, G, b, 2, 1, -1))
            left, right = pairs[LEFT], pairs[RIGHT]
            yield Level(start[RIGHT_KQ], end[LEFT], left, right)
            self.start = multiply_at(start, RIGHT_KQ, left[..., None, :])
            self.end = multiply_at(end, LEFT, right)
            self.total = left * right
            s *= 2

    def result(self) -> tuple[Array, Array, Array]:
        """Rows from the chunk's start, columns to its end, decay over it; after all levels."""
        n, H, G, C, K = self.shape
        xp = array_namespace(self.start)
        return (
            xp.reshape(self.start, (n, H, G, C, 2, K)),
            xp.reshape(self.end, self.shape),
            xp.reshape(self.total, (n, H, G, -1)),
        )


def _single_rows(kq: Array, columns: Array) -> Array:
    """The blocks ``[n, H, G, C, 2, 1, 1]`` of the inverse (0) and ``qk`` (1) for single rows."""
    xp = array_namespace(kq)
    blocks = xp.ones((*columns.shape[:-1], 2, 1, 1), dtype=kq.dtype, device=beside(kq))
    return put(blocks, (..., 1, 0, 0), xp.vecdot(kq[..., 1, :], columns))


def _products(rows: Array, columns: Array) -> Array:
    """``[.., s, 2, K]`` with ``[.., s, K]`` to ``[.., s, 2, s]``."""
    xp = array_namespace(rows)
    *lead, s, _, K = rows.shape
    return xp.reshape(_times_transposed(xp.reshape(rows, (*lead, 2 * s, K)), columns), (*lead, s, 2, s))


def _times_transposed(x: Array, y: Array) -> Array:
    xp = array_namespace(x)
    if y.shape[-2] <= FEW:
        return xp.vecdot(x[..., :, None, :], y[..., None, :, :])
    return x @ xp.matrix_transpose(y)


def _join(blocks: Array, both: Array) -> Array:
    """Joins neighbouring diagonal blocks ``[.., 2b, 2, s, s]`` into ``[.., b, 2, 2s, 2s]``."""
    xp = array_namespace(both)
    *lead, b, s, _, _ = both.shape
    blocks = xp.reshape(blocks, (*lead, b, 2, 2, s, s))
    upper, lower = blocks[..., 0, :, :, :], blocks[..., 1, :, :, :]
    first, second = slice(0, s), slice(s, 2 * s)
    joined = xp.zeros((*lead, b, 2, 2 * s, 2 * s), dtype=blocks.dtype, device=beside(both))
    joined = put(joined, (..., first, first), upper)
    joined = put(joined, (..., second, second), lower)
    # The corner is lower @ (both @ upper), and single rows are 1.
    corner = both[..., 0, :]
    if s > 1:
        right = _times_transposed(xp.matrix_transpose(upper[..., 0, :, :]), corner)
        corner = _times_transposed(lower[..., 0, :, :], right)
    joined = put(joined, (..., 0, second, first), corner)
    return put(joined, (..., 1, second, first), both[..., 1, :])
