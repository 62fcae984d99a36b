"""Inside a chunk: decayed products of q and k and the inverse of a unit lower triangular matrix, with their gradients.

For rows j < i of a chunk the product of ``k_j`` with ``k_i`` or ``q_i`` carries the decay of rows j+1..i, per channel.
Neighbouring blocks of s = 1, 2, 4, ... rows are joined: for a pair of blocks (left, right)

    decay(j -> i) = decay(j -> end of left) * decay(start of right -> i)

so both factors are products of true decays, at most 1, and depend on no row after i. Keys and queries already carry
their factor for block size s when level s begins; joining multiplies them by the other block's total. Nothing is
subtracted, in the exponents or in the gradients, so gates of -60 next to gates of 0 lose no digits.

With ``P = tril(k_i . k_j, -1)``, decayed, the chunk solves ``(I + P beta) x = y``. The strictly lower triangular ``U``
of ``(I + P beta)^-1 = I - U beta`` is built block by block too; unlike the inverse itself it needs no division by beta
in the gradients, and ``(I + beta P)^-1 = I - beta U``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array
from kdacore_reference.arrays import beside, compiled_for_jax, multiply_at, put


class Level(NamedTuple):
    """Joining blocks of ``s >= 2`` rows, ``b`` pairs of them in a chunk."""

    kq_right: Array
    """``[n, H, G, b, s, 2, K]``: keys (0) and queries (1) of right blocks, decayed from the block's start."""
    k_left: Array
    """``[n, H, G, b, s, K]``: keys of left blocks, decayed to the block's end."""
    total_left: Array
    total_right: Array
    """``[n, H, G, b, 1, K]``: decay over a whole block."""


class Intra(NamedTuple):
    """What the forward needs of a chunk."""

    kq_start: Array
    """``[n, H, G, C, 2, K]``: keys (0) and queries (1) decayed from the chunk's start."""
    k_end: Array
    """``[n, H, G, C, K]``: keys decayed to the chunk's end."""
    total: Array
    """``[n, H, G, K]``: decay over the chunk."""
    coupling: Array
    """``[n, H, G, C, C]``: ``U`` above."""
    qk: Array
    """``[n, H, G, C, C]``: ``q_i . k_j`` for j <= i, else 0."""


class Carried(NamedTuple):
    """What the backward needs of a chunk, whose two matrices the forward saved."""

    kq_start: Array
    k_end: Array
    total: Array
    pair_prefix: Array
    """``[n, H, G, C, K]``: decay from the start of each pair of rows."""
    pair_k_left: Array
    """``[n, H, G, C/2, K]``: first keys of the pairs, decayed to the second row."""
    levels: tuple[Level, ...]


RIGHT = (..., 1, slice(None), slice(None))
LEFT = (..., 0, slice(None), slice(None))
RIGHT_KQ = (*RIGHT, slice(None))


@compiled_for_jax()
def interact(kq: Array, decay: Array, beta: Array) -> Intra:
    """All that a chunk computes before it meets a state.

    Args:
        kq: ``[n, H, 1, C, 2, K]``, keys and queries, shared by the group; C a power of two, at least 2.
        decay: ``exp(g)``, ``[n, H, G, C, K]``, or ``[n, H, G, C, 1]`` with a scalar gate.
        beta: ``[n, H, G, C, 1]``.
    """
    xp = array_namespace(kq)
    carry = _Carry(kq, decay)
    blocks = _pair_blocks(kq, carry.pair_k_left)
    for level in carry.levels():
        *lead, b, s, _ = level.k_left.shape
        halves = xp.reshape(beta, (*lead, b, 2, s, 1))
        shaped = xp.reshape(blocks, (*lead, b, 2, 2, s, s))
        blocks = _join(shaped, halves, _products(level.kq_right, level.k_left))
    return Intra(*carry.result(), blocks[..., 0, 0, :, :], blocks[..., 0, 1, :, :])


def solving(coupling: Array, beta: Array) -> Array:
    """``(I + P beta)^-1 = I - U beta``."""
    xp = array_namespace(coupling)
    one = xp.eye(coupling.shape[-1], dtype=coupling.dtype, device=beside(coupling))
    return one - coupling * xp.matrix_transpose(beta)


@compiled_for_jax()
def carry_and_keep(kq: Array, decay: Array) -> Carried:
    """Keys and queries carried as in :func:`interact`, and every level's for its gradients."""
    xp = array_namespace(kq)
    carry = _Carry(kq, decay)
    levels = [
        Level(xp.asarray(level.kq_right, copy=True), xp.asarray(level.k_left, copy=True), *level[2:])
        for level in carry.levels()
    ]
    return Carried(*carry.result(), carry.prefix, carry.pair_k_left, tuple(levels))


class _Carry:
    """Keys and queries on their way from single rows to the whole chunk.

    The first level, rows in pairs, puts the decay on the left key alone.
    """

    def __init__(self, kq: Array, decay: Array) -> None:
        xp = array_namespace(kq)
        n, H, G, C, Kg = decay.shape
        K = kq.shape[-1]
        self.shape = (n, H, G, C, K)
        steps = xp.reshape(decay, (n, H, G, C // 2, 2, Kg))
        pairs = xp.reshape(kq, (n, H, 1, C // 2, 2, 2, K))
        second = (..., 1, slice(None))
        self.pair_k_left = pairs[..., 0, 0, :] * steps[..., 1, :]
        prefix = multiply_at(xp.reshape(xp.asarray(decay, copy=True), steps.shape), second, steps[..., 0, :])
        self.prefix = xp.reshape(prefix, decay.shape)
        if G == 1:
            end = xp.empty_like(kq[..., 0, :])
        else:
            end = xp.empty(self.shape, dtype=kq.dtype, device=beside(kq))
        end = xp.reshape(end, (n, H, G, C // 2, 2, K))
        self.end = put(put(end, (..., 0, slice(None)), self.pair_k_left), second, pairs[..., 1, 0, :])
        self.start = kq * self.prefix[..., None, :]
        self.total = prefix[second]

    def levels(self) -> Iterator[Level]:
        """Yields each level's views before it is joined: use them, or copy them, before asking for the next."""
        n, H, G, C, K = self.shape
        xp = array_namespace(self.start)
        s = 2
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
        """Keys and queries from the chunk's start, keys to its end, decay over it; after all levels."""
        n, H, G, C, K = self.shape
        xp = array_namespace(self.start)
        return (
            xp.reshape(self.start, (n, H, G, C, 2, K)),
            xp.reshape(self.end, self.shape),
            xp.reshape(self.total, (n, H, G, -1)),
        )


def _pair_blocks(kq: Array, k_left: Array) -> Array:
    """The blocks ``[n, H, G, C/2, 2, 2, 2]`` of ``U`` (0) and ``qk`` (1) for pairs of rows."""
    xp = array_namespace(kq)
    *lead, b, K = k_left.shape
    pairs = xp.reshape(kq, (*kq.shape[:3], b, 2, 2, K))
    blocks = xp.zeros((*lead, b, 2, 2, 2), dtype=kq.dtype, device=beside(kq))
    blocks = put(blocks, (..., 1, 0), xp.vecdot(pairs[..., 1, :, :], k_left[..., None, :]))
    diagonal = xp.vecdot(pairs[..., 0, :], pairs[..., 1, :])
    blocks = put(blocks, (..., 1, 0, 0), diagonal[..., 0])
    return put(blocks, (..., 1, 1, 1), diagonal[..., 1])


def _products(rows: Array, columns: Array) -> Array:
    """``[.., s, 2, K]`` with ``[.., s, K]`` to ``[.., s, 2, s]``."""
    xp = array_namespace(rows)
    *lead, s, _, K = rows.shape
    flat = xp.reshape(rows, (*lead, 2 * s, K))
    return xp.reshape(flat @ xp.matrix_transpose(columns), (*lead, s, 2, s))


def _join(blocks: Array, beta: Array, both: Array) -> Array:
    """Joins neighbouring diagonal blocks ``[.., b, 2, 2, s, s]`` into ``[.., b, 2, 2s, 2s]``.

    With ``P`` the lower left products of keys and 1, 2 the two blocks, ``U`` gets there
    ``(I - U2 beta2) P (I - beta1 U1)``.
    """
    xp = array_namespace(both)
    *lead, b, _, _, s, _ = blocks.shape
    upper, lower = blocks[..., 0, :, :, :], blocks[..., 1, :, :, :]
    kk = both[..., 0, :]
    corner = kk - (kk * xp.matrix_transpose(beta[LEFT])) @ upper[..., 0, :, :]
    corner = corner - lower[..., 0, :, :] @ (beta[RIGHT] * corner)
    first, second = slice(0, s), slice(s, 2 * s)
    joined = xp.zeros((*lead, b, 2, 2 * s, 2 * s), dtype=blocks.dtype, device=beside(both))
    joined = put(joined, (..., first, first), upper)
    joined = put(joined, (..., second, second), lower)
    joined = put(joined, (..., 0, second, first), corner)
    return put(joined, (..., 1, second, first), both[..., 1, :])
