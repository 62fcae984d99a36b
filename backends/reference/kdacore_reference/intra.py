"""Within a chunk: decayed products of q and k, and the inverse of a unit lower triangular matrix.

For rows j < i of a chunk the product of ``k_j`` with ``k_i`` or ``q_i`` carries the decay of rows
j+1..i, per channel. Neighbouring blocks of s = 1, 2, 4, ... rows are joined: for a pair of blocks
(left, right)

    decay(j -> i) = decay(j -> end of left) * decay(start of right -> i)

so both factors are products of true decays, at most 1, and depend on no row after i. Rows and
columns already carry their factor for block size s when level s begins; joining multiplies them by
the other block's total. Nothing is subtracted, in the exponents or in the gradients, so gates of
-60 next to gates of 0 lose no digits.

Columns are the keys times beta, rows the queries and the negated keys. With ``P`` the decayed
products of key rows with earlier columns, strictly lower triangular, ``(I - P)^-1`` is built block
by block too: where its blocks ``A1`` and ``A2`` join, the lower left is ``A2 P A1``.

Where the gate is bounded so that the decay over ``base`` rows is far from underflow, blocks of
``base`` rows come first and the rest is joined: in a block rows carry the decay from its start,
columns are divided by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kdacore.types import Array
from kdacore_reference.arrays import add_at, compiled_for_jax, dense, device_of, multiply_at, namespace, put


class Level(NamedTuple):
    """Joining blocks of ``s`` rows, ``b`` pairs of them in a chunk."""

    rows_right: Array
    """``[n, H, G, b, s, 2, K]``: rows, of keys (0) and queries (1), of right blocks, decayed from
    the block's start."""
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


class Base(NamedTuple):
    """Blocks of ``s`` rows that begin the joining, ``b`` of them in a chunk."""

    rows: Array
    """``[n, H, G, b, s, 2, K]``: decayed from the block's start."""
    columns: Array
    """``[n, H, G, b, s, K]``: divided by that decay."""
    prefix: Array
    """``[n, H, G, b, s, K or 1]``: that decay."""


class Carried(NamedTuple):
    """What the backward needs of a chunk, whose two matrices the forward saved."""

    start: Array
    end: Array
    total: Array
    levels: tuple[Level, ...]
    base: Base | None
    """None where single rows begin."""


FEW = 4
"""Products with up to this many columns are computed as dot products: OpenBLAS takes a lock for
every product, however small, which costs two threads more than the product itself."""

KEYS = (..., 0, slice(None))
QUERIES = (..., 1, slice(None))

RIGHT = (..., 1, slice(None), slice(None))
LEFT = (..., 0, slice(None), slice(None))
RIGHT_KQ = (*RIGHT, slice(None))


@compiled_for_jax(static=("base",))
def interact(kq: Array, columns: Array, decay: Array, base: int = 1) -> Intra:
    """Everything in a chunk that does not depend on the state.

    Args: kq: ``[n, H, 1 or G, C, 2, K]``, rows: negated keys and queries; C a power of two, at
        least 2. Overwritten. columns: ``[n, H, G, C, K]``, keys times beta; overwritten. decay:
        ``exp(g)``, ``[n, H, G, C, K]``, or ``[n, H, G, C, 1]`` with a scalar gate. Overwritten.
        base: rows over which decays may be divided by, a power of two and a divisor of C.
    """
    if base == 1:
        blocks = _single_rows(kq, columns)
    else:
        decay = _prefix(decay, base)
        columns /= decay
    factor = decay[..., None, :]
    if kq.shape[2] == decay.shape[2]:
        kq *= factor
    else:
        kq = kq * factor
    if base > 1:
        rows, divided, prefix = _in_blocks(kq, columns, decay, base)
        decay = prefix[..., -1, :]
        blocks = _base_blocks(_products(rows, divided))
        divided *= decay[..., None, :]
        columns = _in_chunks(divided, columns)
    carry = _LevelCarry(kq, columns, decay, base)
    for level in carry.levels():
        blocks = _join(blocks, _products(level.rows_right, level.columns_left))
    return Intra(*carry.result(), blocks[..., 0, 0, :, :], blocks[..., 0, 1, :, :])


@compiled_for_jax(static=("base",))
def carry_decays(kq: Array, columns: Array, decay: Array, base: int = 1) -> Carried:
    """Decayed rows and columns as in :func:`interact`, and those of every level for its gradients;
    ``kq`` is not changed."""
    xp = namespace(kq)
    first = None
    if base > 1:
        decay = _prefix(decay, base)
        columns /= decay
    start = kq * decay[..., None, :]
    if base > 1:
        first = _in_blocks(xp.asarray(start, copy=True), columns, decay, base)
        decay = first.prefix[..., -1, :]
        columns = _in_chunks(first.columns * decay[..., None, :], columns)
    carry = _LevelCarry(start, columns, decay, base)
    levels = [
        Level(xp.asarray(level.rows_right, copy=True), xp.asarray(level.columns_left, copy=True), *level[2:])
        for level in carry.levels()
    ]
    return Carried(*carry.result(), tuple(levels), first)


def _prefix(decay: Array, base: int) -> Array:
    """The decay from the start of each block of ``base`` rows, in place of that of every row."""
    xp = namespace(decay)
    *lead, C, Kg = decay.shape
    s = 1
    while s < base:
        pairs = xp.reshape(decay, (*lead, C // (2 * s), 2, s, Kg))
        pairs = multiply_at(pairs, RIGHT, pairs[..., 0, s - 1 :, :])
        decay = xp.reshape(pairs, (*lead, C, Kg))
        s *= 2
    return decay


def _in_blocks(rows: Array, columns: Array, prefix: Array, base: int) -> Base:
    xp = namespace(rows)
    *lead, C, K = columns.shape
    blocks = (*lead, C // base, base)
    return Base(
        xp.reshape(rows, (*blocks, 2, K)),
        xp.reshape(columns, (*blocks, K)),
        xp.reshape(prefix, (*blocks, prefix.shape[-1])),
    )


def _in_chunks(blocks: Array, like: Array) -> Array:
    return namespace(blocks).reshape(blocks, like.shape)


def earlier(s: int, like: Array) -> Array:
    """``[s, s]``, true left of the diagonal."""
    xp = namespace(like)
    rows = xp.arange(s, device=device_of(like))
    return rows[:, None] > rows


class _LevelCarry:
    """Rows and columns with their decays, from single rows up to the whole chunk, level by level."""

    def __init__(self, start: Array, end: Array, decay: Array, first: int) -> None:
        """Start from blocks of ``first`` rows with decay ``decay``. For single rows ``start``
        contains their decay and ``end`` none. Both are overwritten."""
        self.first = first
        self.shape = end.shape
        self.start = start
        self.end = end
        self.total = decay

    def levels(self) -> Iterator[Level]:
        """Yields each level's views before it is joined: use them, or copy them, before asking for
        the next."""
        n, H, G, C, K = self.shape
        xp = namespace(self.start)
        s = self.first
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
        """After all levels: rows decayed from the chunk's start, columns to its end, and the decay
        over it."""
        n, H, G, C, K = self.shape
        xp = namespace(self.start)
        return (
            xp.reshape(self.start, (n, H, G, C, 2, K)),
            xp.reshape(self.end, self.shape),
            xp.reshape(self.total, (n, H, G, -1)),
        )


def _single_rows(kq: Array, columns: Array) -> Array:
    """The blocks ``[n, H, G, C, 2, 1, 1]`` of the inverse (0) and ``qk`` (1) for single rows."""
    xp = namespace(kq)
    blocks = xp.ones((*columns.shape[:-1], 2, 1, 1), dtype=kq.dtype, device=device_of(kq))
    return put(blocks, (..., 1, 0, 0), xp.vecdot(kq[..., 1, :], columns))


def _base_blocks(both: Array) -> Array:
    """The blocks ``[.., 2, s, s]`` of the inverse (0) and ``qk`` (1) from their products
    ``[.., s, 2, s]``.

    What is right of the diagonal is not read.
    """
    xp = namespace(both)
    *lead, s, _, _ = both.shape
    blocks = xp.empty((*lead, 2, s, s), dtype=both.dtype, device=device_of(both))
    queries = both[..., 1, :]
    blocks = put(blocks, RIGHT, xp.where(earlier(s, both).T, xp.zeros_like(queries), queries))
    return put(blocks, LEFT, _inverse(both[..., 0, :]))


def _inverse(P: Array) -> Array:
    """``(I - P)^-1`` row by row, ``P`` being ``[.., s, s]``; all blocks at once, along the last
    axis."""
    xp = namespace(P)
    s = P.shape[-1]
    across = dense(xp.permute_dims(xp.reshape(P, (-1, s, s)), (1, 2, 0)))
    inverse = xp.zeros_like(across)
    for i in range(s):
        inverse = put(inverse, (i, i), 1.0)
    for j in range(s - 1):
        below, left = slice(j + 1, s), slice(0, j + 1)
        inverse = add_at(inverse, (below, left), across[below, j, None, :] * inverse[j, left, :])
    return xp.reshape(xp.permute_dims(inverse, (2, 0, 1)), P.shape)


def _products(rows: Array, columns: Array) -> Array:
    """``[.., s, 2, K]`` with ``[.., s, K]`` to ``[.., s, 2, s]``."""
    xp = namespace(rows)
    *lead, s, _, K = rows.shape
    return xp.reshape(_times_transposed(xp.reshape(rows, (*lead, 2 * s, K)), columns), (*lead, s, 2, s))


def _times_transposed(x: Array, y: Array) -> Array:
    xp = namespace(x)
    if y.shape[-2] <= FEW:
        return xp.vecdot(x[..., :, None, :], y[..., None, :, :])
    return x @ xp.matrix_transpose(y)


def _join(blocks: Array, both: Array) -> Array:
    """Joins neighbouring diagonal blocks ``[.., 2b, 2, s, s]`` into ``[.., b, 2, 2s, 2s]``."""
    xp = namespace(both)
    *lead, b, s, _, _ = both.shape
    blocks = xp.reshape(blocks, (*lead, b, 2, 2, s, s))
    upper, lower = blocks[..., 0, :, :, :], blocks[..., 1, :, :, :]
    first, second = slice(0, s), slice(s, 2 * s)
    joined = xp.zeros((*lead, b, 2, 2 * s, 2 * s), dtype=blocks.dtype, device=device_of(both))
    joined = put(joined, (..., first, first), upper)
    joined = put(joined, (..., second, second), lower)
    # The corner is lower @ (both @ upper), and single rows are 1.
    corner = both[..., 0, :]
    if s > 1:
        right = _times_transposed(xp.matrix_transpose(upper[..., 0, :, :]), corner)
        corner = _times_transposed(lower[..., 0, :, :], right)
    joined = put(joined, (..., 0, second, first), corner)
    return put(joined, (..., 1, second, first), both[..., 1, :])
