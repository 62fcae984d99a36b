"""Inside a chunk: decayed products of q and k and the inverse of a unit lower triangular matrix, with their gradients.

For rows j < i of a chunk the product of ``k_j`` with ``k_i`` or ``q_i`` carries the decay of rows j+1..i, per channel.
Neighbouring blocks of s = 1, 2, 4, ... rows are joined: for a pair of blocks (left, right)

    decay(j -> i) = decay(j -> end of left) * decay(start of right -> i)

so both factors are products of true decays, at most 1, and depend on no row after i. Keys and queries already carry
their factor for block size s when level s begins; joining multiplies them by the other block's total. Nothing is
subtracted, in the exponents or in the gradients, so gates of -60 next to gates of 0 lose no digits.
"""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array
from kdacore_reference.arrays import add_at, beside, compiled_for_jax, multiply_at, put


class Level(NamedTuple):
    """What the backward needs of joining blocks of ``s`` rows: ``b`` pairs of them in a chunk."""

    kq_right: Array
    """``[n, H, G, b, s, 2, K]``: keys (0) and queries (1) of right blocks, decayed from the block's start."""
    k_left: Array
    """``[n, H, G, b, s, K]``: keys of left blocks, decayed to the block's end."""
    total_left: Array
    total_right: Array
    """``[n, H, G, b, 1, K]``: decay over a whole block."""
    kk: Array
    """``[n, H, G, b, s, s]``: the products of keys, before beta."""


class Intra(NamedTuple):
    kq_start: Array
    """``[n, H, G, C, 2, K]``: keys (0) and queries (1) decayed from the chunk's start."""
    k_end: Array
    """``[n, H, G, C, K]``: keys decayed to the chunk's end."""
    total: Array
    """``[n, H, G, K]``: decay over the chunk."""
    inverse: Array
    """``[n, H, G, C, C]``: of ``I + tril(beta_i k_i . k_j, -1)``."""
    qk: Array
    """``[n, H, G, C, C]``: ``q_i . k_j`` for j <= i, else 0."""
    levels: tuple[Level, ...] = ()


@compiled_for_jax(static=("keep",))
def interact(kq: Array, decay: Array, beta: Array, keep: bool = False) -> Intra:
    """All that a chunk computes before it meets a state.

    Args:
        kq: ``[n, H, 1, C, 2, K]``, keys and queries, shared by the group; C a power of two.
        decay: ``exp(g)``, ``[n, H, G, C, K]``, or ``[n, H, G, C, 1]`` with a scalar gate.
        beta: ``[n, H, G, C, 1]``.
        keep: keep what :func:`interact_backward` needs.
    """
    xp = array_namespace(kq)
    n, H, G, C, _ = decay.shape
    K = kq.shape[-1]
    start = kq * decay[..., None, :]
    end = xp.broadcast_to(kq[..., 0, :], (n, H, G, C, K))
    end = xp.asarray(end, copy=True)
    total = decay
    # The inverse (0) and the products with queries (1), joined side by side.
    diagonal = xp.broadcast_to(xp.sum(kq[..., 0, :] * kq[..., 1, :], axis=-1), (n, H, G, C))
    blocks = xp.stack([xp.ones_like(diagonal), diagonal], axis=-1)[..., None, None]
    levels = []
    s = 1
    while s < C:
        b = C // (2 * s)
        start = xp.reshape(start, (n, H, G, b, 2, s, 2, K))
        end = xp.reshape(end, (n, H, G, b, 2, s, K))
        pairs = xp.reshape(total, (n, H, G, b, 2, 1, -1))
        left, right = pairs[..., 0, :, :], pairs[..., 1, :, :]
        kq_right, k_left = start[..., 1, :, :, :], end[..., 0, :, :]
        both = _products(kq_right, k_left)
        kk = both[..., 0, :]
        scaled = xp.reshape(beta, (n, H, G, b, 2, s, 1))[..., 1, :, :] * kk
        blocks = _join(xp.reshape(blocks, (n, H, G, b, 2, 2, s, s)), scaled, both[..., 1, :])
        if keep:
            kq_right, k_left = xp.asarray(kq_right, copy=True), xp.asarray(k_left, copy=True)
            levels.append(Level(kq_right, k_left, left, right, kk))
        start = multiply_at(start, (..., 1, slice(None), slice(None), slice(None)), left[..., None, :])
        end = multiply_at(end, (..., 0, slice(None), slice(None)), right)
        total = left * right
        s *= 2
    return Intra(
        xp.reshape(start, (n, H, G, C, 2, K)),
        xp.reshape(end, (n, H, G, C, K)),
        xp.reshape(total, (n, H, G, -1)),
        blocks[..., 0, 0, :, :],
        blocks[..., 0, 1, :, :],
        tuple(levels),
    )


def _products(rows: Array, columns: Array) -> Array:
    """``[.., s, 2, K]`` with ``[.., s, K]`` to ``[.., s, 2, s]``."""
    xp = array_namespace(rows)
    *lead, s, _, K = rows.shape
    if s == 1:
        return xp.sum(rows * columns[..., None, :], axis=-1, keepdims=True)
    flat = xp.reshape(rows, (*lead, 2 * s, K))
    return xp.reshape(flat @ xp.matrix_transpose(columns), (*lead, s, 2, s))


def _join(blocks: Array, kk: Array, qk: Array) -> Array:
    """Joins neighbouring diagonal blocks ``[.., b, 2, 2, s, s]`` into ``[.., b, 2, 2s, 2s]``.

    The inverse of ``[[P, 0], [A, Q]]`` has ``-Q^-1 A P^-1`` in its lower left corner; ``A`` is ``kk``.
    """
    xp = array_namespace(kk)
    *lead, b, _, _, s, _ = blocks.shape
    upper, lower = blocks[..., 0, :, :, :], blocks[..., 1, :, :, :]
    corner = -kk if s == 1 else -(lower[..., 0, :, :] @ (kk @ upper[..., 0, :, :]))
    first, second = slice(0, s), slice(s, 2 * s)
    joined = xp.zeros((*lead, b, 2, 2 * s, 2 * s), dtype=blocks.dtype, device=beside(kk))
    joined = put(joined, (..., first, first), upper)
    joined = put(joined, (..., second, second), lower)
    joined = put(joined, (..., 0, second, first), corner)
    return put(joined, (..., 1, second, first), qk)


class IntraGrads(NamedTuple):
    kq: Array
    """``[n, H, C, 2, K]``, summed over the group."""
    log_decay: Array
    """``[n, H, G, C, K or 1]``."""
    beta: Array
    """``[n, H, G, C, 1]``: only what flows through the triangular matrix."""


@compiled_for_jax()
def interact_backward(
    kq: Array,
    decay: Array,
    beta: Array,
    intra: Intra,
    dstart: Array,
    dend: Array,
    dlog_total: Array,
    dpairs: Array,
) -> IntraGrads:
    """The adjoint of :func:`interact`, from the largest blocks down.

    Args:
        kq: as in the forward.
        decay: as in the forward.
        beta: as in the forward.
        intra: the forward's result, with ``keep``.
        dstart: gradient of ``kq_start``; overwritten.
        dend: gradient of ``k_end``; overwritten.
        dlog_total: gradient of ``log(total)``, ``[n, H, G, K or 1]``.
        dpairs: ``[n, H, G, C, 2, C]``, gradients of the triangular matrix (0) and of ``qk`` (1); above the diagonal
            anything finite.
    """
    xp = array_namespace(kq)
    n, H, G, C, Kg = decay.shape
    K = kq.shape[-1]

    def per_gate(x: Array) -> Array:
        return x if Kg == K else xp.sum(x, axis=-1, keepdims=True)

    # Gradients of the logarithms of the factors that each row carries: from its block's start, to its block's end.
    row_log = per_gate(_sum_kq(dstart * intra.kq_start))
    column_log = per_gate(dend * intra.k_end)
    row_log = _add_to_last(row_log, dlog_total[..., None, :])
    dbeta = xp.zeros((n, H, G, C, 1), dtype=kq.dtype, device=beside(kq))
    dpairs = dpairs[..., None, :, :, :]
    for level in reversed(intra.levels):
        b, s = level.k_left.shape[3:5]
        rows, columns = dpairs[..., s:, :, :s], level.k_left
        kk_grad = rows[..., 0, :]
        shaped_beta = xp.reshape(beta, (n, H, G, b, 2, s, 1))
        dbeta = xp.reshape(dbeta, (n, H, G, b, 2, s, 1))
        right = (..., 1, slice(None), slice(None))
        left = (..., 0, slice(None), slice(None))
        dbeta = add_at(dbeta, right, xp.sum(kk_grad * level.kk, axis=-1, keepdims=True))
        both = xp.stack([kk_grad * shaped_beta[..., 1, :, :], rows[..., 1, :]], axis=-2)
        dright, dleft = _products_backward(both, level.kq_right, columns)

        row_log = xp.reshape(row_log, (n, H, G, b, 2, s, Kg))
        column_log = xp.reshape(column_log, (n, H, G, b, 2, s, Kg))
        through_left = xp.sum(row_log[..., 1, :, :], axis=-2, keepdims=True)
        through_right = xp.sum(column_log[..., 0, :, :], axis=-2, keepdims=True)
        row_log = add_at(row_log, right, per_gate(_sum_kq(dright * level.kq_right)))
        column_log = add_at(column_log, left, per_gate(dleft * columns))
        row_log = _add_to_last(row_log, xp.stack([through_left, through_right], axis=-3))

        dstart = xp.reshape(dstart, (n, H, G, b, 2, s, 2, K))
        dend = xp.reshape(dend, (n, H, G, b, 2, s, K))
        wide = (*right, slice(None))
        dstart = add_at(multiply_at(dstart, wide, level.total_left[..., None, :]), wide, dright)
        dend = add_at(multiply_at(dend, left, level.total_right), left, dleft)
        dpairs = _diagonal_blocks(dpairs, s)

    dstart = xp.reshape(dstart, (n, H, G, C, 2, K)) * decay[..., None, :]
    dkq = xp.sum(dstart, axis=2)
    dk = xp.sum(xp.reshape(dend, (n, H, G, C, K)), axis=2)
    diagonal = xp.sum(xp.reshape(dpairs[..., 1, :], (n, H, G, C, 1)), axis=2)
    shared = kq[:, :, 0, ...]
    dk = dkq[..., 0, :] + dk + diagonal * shared[..., 1, :]
    dq = dkq[..., 1, :] + diagonal * shared[..., 0, :]
    return IntraGrads(
        xp.stack([dk, dq], axis=-2),
        xp.reshape(row_log, (n, H, G, C, Kg)),
        xp.reshape(dbeta, (n, H, G, C, 1)),
    )


def _sum_kq(x: Array) -> Array:
    return x[..., 0, :] + x[..., 1, :]


def _add_to_last(log: Array, value: Array) -> Array:
    """Adds to the last row of each block: the block's total is the factor of its last row."""
    return add_at(log, (..., slice(-1, None), slice(None)), value)


def _products_backward(dboth: Array, rows: Array, columns: Array) -> tuple[Array, Array]:
    """The adjoint of :func:`_products`."""
    xp = array_namespace(rows)
    *lead, s, _, K = rows.shape
    if s == 1:
        return dboth * columns[..., None, :], xp.sum(dboth * rows, axis=-2)
    flat = xp.reshape(dboth, (*lead, 2 * s, s))
    drows = xp.reshape(flat @ columns, (*lead, s, 2, K))
    return drows, xp.matrix_transpose(flat) @ xp.reshape(rows, (*lead, 2 * s, K))


def _diagonal_blocks(dpairs: Array, s: int) -> Array:
    """``[n, H, G, b, 2s, 2, 2s]`` to its diagonal blocks ``[n, H, G, 2b, s, 2, s]``."""
    xp = array_namespace(dpairs)
    n, H, G, b = dpairs.shape[:4]
    halves = xp.stack([dpairs[..., :s, :, :s], dpairs[..., s:, :, s:]], axis=4)
    return xp.reshape(halves, (n, H, G, 2 * b, s, 2, s))
