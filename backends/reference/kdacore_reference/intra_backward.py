"""The adjoint of :mod:`kdacore_reference.intra`, from the largest blocks down to single rows."""

from __future__ import annotations

from typing import NamedTuple

from kdacore.types import Array
from kdacore_reference.arrays import add_at, compiled_for_jax, multiply_at, namespace, store
from kdacore_reference.intra import LEFT, RIGHT, RIGHT_KQ, Base, Carried, earlier


class IntraGrads(NamedTuple):
    kq: Array
    """``[n, H, G, C, 2, K]``."""
    columns: Array
    """``[n, H, G, C, K]``; this and ``kq`` without what the diagonal of ``qk`` gives."""
    log_decay: Array
    """``[n, H, G, C, K or 1]``."""
    diagonal: Array
    """``[n, H, G, C, 1]``: gradient of the diagonal of ``qk``."""


@compiled_for_jax()
def interact_backward(
    carried: Carried, decay: Array, dstart: Array, dend: Array, dlog_total: Array, dpairs: Array
) -> IntraGrads:
    """Gradients of rows, columns and log decays.

    Args: carried: of :func:`~kdacore_reference.intra.carry_decays`. decay: what was given to that;
        only its shape is read where ``carried`` has a base. dstart: gradient of ``start``;
        overwritten. dend: gradient of ``end``; overwritten. dlog_total: gradient of ``log(total)``,
        ``[n, H, G, K or 1]``. dpairs: ``[n, H, G, C, 2, C]``, gradients of ``P`` (0) and of ``qk``
        (1); above the diagonal anything finite.
    """
    xp = namespace(decay)
    n, H, G, C, Kg = decay.shape
    K = dend.shape[-1]

    # Gradients of the logarithms of the factors that each row carries: from its block's start, to
    # its block's end.
    row_log = _kq_product(dstart, carried.start, Kg)
    column_log = _product(dend, carried.end, Kg)
    row_log = _add_to_last(row_log, dlog_total[..., None, :])
    dpairs = dpairs[..., None, :, :, :]
    for level in reversed(carried.levels):
        b, s = level.columns_left.shape[3:5]
        dright, dleft = _products_backward(dpairs[..., s:, :, :s], level.rows_right, level.columns_left)
        row_log = xp.reshape(row_log, (n, H, G, b, 2, s, Kg))
        column_log = xp.reshape(column_log, (n, H, G, b, 2, s, Kg))
        through_left = xp.sum(row_log[RIGHT], axis=-2, keepdims=True)
        through_right = xp.sum(column_log[LEFT], axis=-2, keepdims=True)
        row_log = add_at(row_log, RIGHT, _kq_product(dright, level.rows_right, Kg))
        column_log = add_at(column_log, LEFT, _product(dleft, level.columns_left, Kg))
        row_log = _add_to_last(row_log, xp.stack([through_left, through_right], axis=-3))

        dstart = xp.reshape(dstart, (n, H, G, b, 2, s, 2, K))
        dend = xp.reshape(dend, (n, H, G, b, 2, s, K))
        dstart = add_at(multiply_at(dstart, RIGHT_KQ, level.total_left[..., None, :]), RIGHT_KQ, dright)
        dend = add_at(multiply_at(dend, LEFT, level.total_right), LEFT, dleft)
        dpairs = _diagonal_blocks(dpairs, s)
    if carried.base is not None:
        return _base_backward(carried.base, decay, dstart, dend, row_log, column_log, dpairs)
    dkq = xp.reshape(dstart, (n, H, G, C, 2, K))
    dkq *= decay[..., None, :]
    return IntraGrads(
        dkq,
        xp.reshape(dend, (n, H, G, C, K)),
        xp.reshape(row_log, decay.shape),
        xp.reshape(dpairs[..., 1, :], (n, H, G, C, 1)),
    )


def _base_backward(
    base: Base, decay: Array, dstart: Array, dend: Array, row_log: Array, column_log: Array, dpairs: Array
) -> IntraGrads:
    """The end of :func:`interact_backward` when blocks of several rows are left; it overwrites
    ``dstart``, ``dend``.

    The product of a pair contains the decays of the rows after the column and up to the row. Unlike
    in joining, their gradients are differences of sums over the later rows; the gate's bound keeps
    the terms similar in size.
    """
    xp = namespace(decay)
    n, H, G, C, Kg = decay.shape
    b, s, K = base.columns.shape[3:]
    before = earlier(s, decay)
    diagonal = xp.linalg.diagonal(dpairs[..., 1, :])
    dpairs = xp.where(before[:, None, :], dpairs, xp.zeros_like(dpairs))
    drows, dcolumns = _products_backward(dpairs, base.rows, base.columns)
    row_log = xp.reshape(row_log, (n, H, G, b, s, Kg))
    row_log += _kq_product(drows, base.rows, Kg)
    row_log -= _product(dcolumns, base.columns, Kg)
    before = xp.astype(before, decay.dtype)
    from_here = 1.0 - before
    dlog = from_here @ row_log
    dlog += before @ xp.reshape(column_log, (n, H, G, b, s, Kg))
    drows += xp.reshape(dstart, base.rows.shape)
    drows *= base.prefix[..., None, :]
    dend = xp.reshape(dend, base.columns.shape)
    dend *= base.prefix[..., -1:, :]
    dcolumns += dend
    dcolumns /= base.prefix
    return IntraGrads(
        xp.reshape(drows, (n, H, G, C, 2, K)),
        xp.reshape(dcolumns, (n, H, G, C, K)),
        xp.reshape(dlog, decay.shape),
        xp.reshape(diagonal, (n, H, G, C, 1)),
    )


def _product(x: Array, y: Array, width: int) -> Array:
    """``x * y``, summed over channels when they share one gate."""
    if width == x.shape[-1]:
        return x * y
    return namespace(x).vecdot(x, y)[..., None]


def _kq_product(x: Array, y: Array, width: int) -> Array:
    """``x * y`` ``[.., 2, K]`` summed over keys and queries, and over channels when they share one
    gate."""
    product = _product(x, y, width)
    return product[..., 0, :] + product[..., 1, :]


def _add_to_last(log: Array, value: Array) -> Array:
    """Adds to the last row of each block: the block's total is the factor of its last row."""
    return add_at(log, (..., slice(-1, None), slice(None)), value)


def _products_backward(dboth: Array, rows: Array, columns: Array) -> tuple[Array, Array]:
    """Gradients of ``rows`` ``[.., s, 2, K]`` and ``columns`` ``[.., s, K]`` from that of their
    products."""
    xp = namespace(rows)
    *lead, s, _, K = rows.shape
    if s == 1:
        return dboth * columns[..., None, :], xp.sum(dboth * rows, axis=-2)
    flat = xp.reshape(dboth, (*lead, 2 * s, s))
    drows = xp.reshape(xp.empty_like(rows), (*lead, 2 * s, K))
    drows = store(drows, ..., xp.matmul, flat, columns)
    flat_rows = xp.reshape(rows, (*lead, 2 * s, K))
    dcolumns = store(xp.empty_like(columns), ..., xp.matmul, xp.matrix_transpose(flat), flat_rows)
    return xp.reshape(drows, (*lead, s, 2, K)), dcolumns


def _diagonal_blocks(dpairs: Array, s: int) -> Array:
    """``[n, H, G, b, 2s, 2, 2s]`` to its diagonal blocks ``[n, H, G, 2b, s, 2, s]``."""
    xp = namespace(dpairs)
    n, H, G, b = dpairs.shape[:4]
    halves = xp.stack([dpairs[..., :s, :, :s], dpairs[..., s:, :, s:]], axis=4)
    return xp.reshape(halves, (n, H, G, 2 * b, s, 2, s))
