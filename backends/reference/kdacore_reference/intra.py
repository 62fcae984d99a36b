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

from typing import NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array
from kdacore_reference.arrays import beside, compiled_for_jax, multiply_at, put


class Level(NamedTuple):
    """What the backward needs of joining blocks of ``s >= 2`` rows: ``b`` pairs of them in a chunk."""

    kq_right: Array
    """``[n, H, G, b, s, 2, K]``: keys (0) and queries (1) of right blocks, decayed from the block's start."""
    k_left: Array
    """``[n, H, G, b, s, K]``: keys of left blocks, decayed to the block's end."""
    total_left: Array
    total_right: Array
    """``[n, H, G, b, 1, K]``: decay over a whole block."""


class Intra(NamedTuple):
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
    pair_prefix: Array
    """``[n, H, G, C, K]``: decay from the start of each pair of rows."""
    pair_k_left: Array
    """``[n, H, G, C/2, K]``: first keys of the pairs, decayed to the second row."""
    levels: tuple[Level, ...] = ()


RIGHT = (..., 1, slice(None), slice(None))
LEFT = (..., 0, slice(None), slice(None))
RIGHT_KQ = (*RIGHT, slice(None))


@compiled_for_jax(static=("keep",))
def interact(kq: Array, decay: Array, beta: Array, keep: bool = False) -> Intra:
    """All that a chunk computes before it meets a state.

    Args:
        kq: ``[n, H, 1, C, 2, K]``, keys and queries, shared by the group; C a power of two, at least 2.
        decay: ``exp(g)``, ``[n, H, G, C, K]``, or ``[n, H, G, C, 1]`` with a scalar gate.
        beta: ``[n, H, G, C, 1]``.
        keep: keep what :func:`interact_backward` needs.
    """
    xp = array_namespace(kq)
    n, H, G, C, Kg = decay.shape
    K = kq.shape[-1]
    prefix, k_left, end, blocks = _join_rows(kq, decay)
    start = kq * prefix[..., None, :]
    total = xp.reshape(prefix, (n, H, G, C // 2, 2, Kg))[..., 1, :]
    levels = []
    s = 2
    while s < C:
        b = C // (2 * s)
        start = xp.reshape(start, (n, H, G, b, 2, s, 2, K))
        end = xp.reshape(end, (n, H, G, b, 2, s, K))
        pairs = xp.reshape(total, (n, H, G, b, 2, 1, Kg))
        left, right = pairs[LEFT], pairs[RIGHT]
        kq_right, k_end_left = start[RIGHT_KQ], end[LEFT]
        both = _products(kq_right, k_end_left)
        halves = xp.reshape(beta, (n, H, G, b, 2, s, 1))
        blocks = _join(xp.reshape(blocks, (n, H, G, b, 2, 2, s, s)), halves, both)
        if keep:
            kept = (xp.asarray(kq_right, copy=True), xp.asarray(k_end_left, copy=True))
            levels.append(Level(*kept, left, right))
        start = multiply_at(start, RIGHT_KQ, left[..., None, :])
        end = multiply_at(end, LEFT, right)
        total = left * right
        s *= 2
    return Intra(
        kq_start=xp.reshape(start, (n, H, G, C, 2, K)),
        k_end=xp.reshape(end, (n, H, G, C, K)),
        total=xp.reshape(total, (n, H, G, Kg)),
        coupling=blocks[..., 0, 0, :, :],
        qk=blocks[..., 0, 1, :, :],
        pair_prefix=prefix,
        pair_k_left=k_left,
        levels=tuple(levels),
    )


def _join_rows(kq: Array, decay: Array) -> tuple[Array, Array, Array, Array]:
    """The first level: rows in pairs, where the decay sits on the left key alone.

    Returns the decay from each pair's start, the decayed left keys, the keys decayed to their pair's end, and the
    blocks ``[n, H, G, C/2, 2, 2, 2]`` of ``U`` (0) and ``qk`` (1).
    """
    xp = array_namespace(kq)
    n, H, G, C, Kg = decay.shape
    K = kq.shape[-1]
    b = C // 2
    steps = xp.reshape(decay, (n, H, G, b, 2, Kg))
    kq_pairs = xp.reshape(kq, (n, H, 1, b, 2, 2, K))
    k_left = kq_pairs[..., 0, 0, :] * steps[..., 1, :]
    both = xp.vecdot(kq_pairs[..., 1, :, :], k_left[..., None, :])
    diagonal = xp.vecdot(kq_pairs[..., 0, :], kq_pairs[..., 1, :])
    blocks = xp.zeros((n, H, G, b, 2, 2, 2), dtype=kq.dtype, device=beside(kq))
    blocks = put(blocks, (..., 1, 0), both)
    blocks = put(blocks, (..., 1, 0, 0), diagonal[..., 0])
    blocks = put(blocks, (..., 1, 1, 1), diagonal[..., 1])
    prefix = xp.reshape(xp.asarray(decay, copy=True), steps.shape)
    prefix = multiply_at(prefix, (..., 1, slice(None)), steps[..., 0, :])
    end = (
        xp.empty_like(kq[..., 0, :])
        if G == 1
        else xp.empty((n, H, G, C, K), dtype=kq.dtype, device=beside(kq))
    )
    end = xp.reshape(end, (n, H, G, b, 2, K))
    end = put(put(end, (..., 0, slice(None)), k_left), (..., 1, slice(None)), kq_pairs[..., 1, 0, :])
    return xp.reshape(prefix, decay.shape), k_left, end, blocks


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
