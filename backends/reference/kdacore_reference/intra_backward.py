"""The adjoint of :mod:`kdacore_reference.intra`, from the largest blocks down to single rows."""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array
from kdacore_reference.arrays import add_at, compiled_for_jax, multiply_at
from kdacore_reference.intra import LEFT, RIGHT, RIGHT_KQ, Carried


class IntraGrads(NamedTuple):
    k: Array
    q: Array
    """``[n, H, C, K]``, summed over the group."""
    log_decay: Array
    """``[n, H, G, C, K or 1]``."""


@compiled_for_jax()
def interact_backward(
    kq: Array, decay: Array, carried: Carried, dstart: Array, dend: Array, dlog_total: Array, dpairs: Array
) -> IntraGrads:
    """Gradients of keys, queries and log decays.

    Args:
        kq: as in the forward.
        decay: as in the forward.
        carried: of :func:`~kdacore_reference.intra.carry_and_keep`.
        dstart: gradient of ``kq_start``; overwritten.
        dend: gradient of ``k_end``; overwritten.
        dlog_total: gradient of ``log(total)``, ``[n, H, G, K or 1]``.
        dpairs: ``[n, H, G, C, 2, C]``, gradients of ``P`` (0) and of ``qk`` (1); above the diagonal anything finite.
    """
    xp = array_namespace(kq)
    n, H, G, _, Kg = decay.shape
    K = kq.shape[-1]

    # Gradients of the logarithms of the factors that each row carries: from its block's start, to its block's end.
    row_log = _kq_product(dstart, carried.kq_start, Kg)
    column_log = _product(dend, carried.k_end, Kg)
    row_log = _add_to_last(row_log, dlog_total[..., None, :])
    dpairs = dpairs[..., None, :, :, :]
    for level in reversed(carried.levels):
        b, s = level.k_left.shape[3:5]
        dright, dleft = _products_backward(dpairs[..., s:, :, :s], level.kq_right, level.k_left)
        row_log = xp.reshape(row_log, (n, H, G, b, 2, s, Kg))
        column_log = xp.reshape(column_log, (n, H, G, b, 2, s, Kg))
        through_left = xp.sum(row_log[RIGHT], axis=-2, keepdims=True)
        through_right = xp.sum(column_log[LEFT], axis=-2, keepdims=True)
        row_log = add_at(row_log, RIGHT, _kq_product(dright, level.kq_right, Kg))
        column_log = add_at(column_log, LEFT, _product(dleft, level.k_left, Kg))
        row_log = _add_to_last(row_log, xp.stack([through_left, through_right], axis=-3))

        dstart = xp.reshape(dstart, (n, H, G, b, 2, s, 2, K))
        dend = xp.reshape(dend, (n, H, G, b, 2, s, K))
        dstart = add_at(multiply_at(dstart, RIGHT_KQ, level.total_left[..., None, :]), RIGHT_KQ, dright)
        dend = add_at(multiply_at(dend, LEFT, level.total_right), LEFT, dleft)
        dpairs = _diagonal_blocks(dpairs, s)
    return _rows_backward(kq, decay, carried, dstart, dend, (row_log, column_log), dpairs)


def _rows_backward(
    kq: Array,
    decay: Array,
    carried: Carried,
    dstart: Array,
    dend: Array,
    logs: tuple[Array, Array],
    dpairs: Array,
) -> IntraGrads:
    """The adjoint of joining single rows; ``dpairs`` is ``[n, H, G, C/2, 2, 2, 2]``: row, key or query, column."""
    xp = array_namespace(kq)
    n, H, G, C, Kg = decay.shape
    K = kq.shape[-1]
    row_log, column_log = (xp.reshape(x, (n, H, G, C // 2, 2, Kg)) for x in logs)
    kq_pairs = xp.reshape(kq, (n, H, 1, C // 2, 2, 2, K))
    k_left = carried.pair_k_left
    corner = dpairs[..., 1, :, 0]
    dk_left = corner[..., 0, None] * kq_pairs[..., 1, 0, :] + corner[..., 1, None] * kq_pairs[..., 1, 1, :]
    first = row_log[..., 0, :] + row_log[..., 1, :]
    second = row_log[..., 1, :] + column_log[..., 0, :] + _product(dk_left, k_left, Kg)
    log_decay = xp.reshape(xp.stack([first, second], axis=-2), decay.shape)

    dkq = xp.reshape(dstart, (n, H, G, C, 2, K)) * carried.pair_prefix[..., None, :]
    dkq = xp.reshape(dkq, (n, H, G, C // 2, 2, 2, K))
    dkq = add_at(dkq, (..., 1, slice(None), slice(None)), corner[..., None] * k_left[..., None, :])
    dend = xp.reshape(dend, (n, H, G, C // 2, 2, K))
    dend = add_at(dend, (..., 0, slice(None)), dk_left)
    dend = multiply_at(dend, (..., 0, slice(None)), xp.reshape(decay, (n, H, G, C // 2, 2, Kg))[..., 1, :])
    diagonal = xp.stack([dpairs[..., 0, 1, 0], dpairs[..., 1, 1, 1]], axis=-1)[..., None]
    dk = dkq[..., 0, :] + dend + diagonal * kq_pairs[..., 1, :]
    dq = dkq[..., 1, :] + diagonal * kq_pairs[..., 0, :]
    dk, dq = (_over_group(xp.reshape(x, (n, H, G, C, K))) for x in (dk, dq))
    return IntraGrads(dk, dq, log_decay)


def _over_group(x: Array) -> Array:
    """The sum over value heads that share a query/key head."""
    return x[:, :, 0, ...] if x.shape[2] == 1 else array_namespace(x).sum(x, axis=2)


def _product(x: Array, y: Array, width: int) -> Array:
    """``x * y``, summed over channels when they share one gate."""
    if width == x.shape[-1]:
        return x * y
    return array_namespace(x).vecdot(x, y)[..., None]


def _kq_product(x: Array, y: Array, width: int) -> Array:
    """``x * y`` ``[.., 2, K]`` summed over keys and queries, and over channels when they share one gate."""
    product = _product(x, y, width)
    return product[..., 0, :] + product[..., 1, :]


def _add_to_last(log: Array, value: Array) -> Array:
    """Adds to the last row of each block: the block's total is the factor of its last row."""
    return add_at(log, (..., slice(-1, None), slice(None)), value)


def _products_backward(dboth: Array, rows: Array, columns: Array) -> tuple[Array, Array]:
    """Gradients of ``rows`` ``[.., s, 2, K]`` and ``columns`` ``[.., s, K]`` from that of their products."""
    xp = array_namespace(rows)
    *lead, s, _, K = rows.shape
    flat = xp.reshape(dboth, (*lead, 2 * s, s))
    drows = xp.reshape(flat @ columns, (*lead, s, 2, K))
    return drows, xp.matrix_transpose(flat) @ xp.reshape(rows, (*lead, 2 * s, K))


def _diagonal_blocks(dpairs: Array, s: int) -> Array:
    """``[n, H, G, b, 2s, 2, 2s]`` to its diagonal blocks ``[n, H, G, 2b, s, 2, s]``."""
    xp = array_namespace(dpairs)
    n, H, G, b = dpairs.shape[:4]
    halves = xp.stack([dpairs[..., :s, :, :s], dpairs[..., s:, :, s:]], axis=4)
    return xp.reshape(halves, (n, H, G, 2 * b, s, 2, s))
