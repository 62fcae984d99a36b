"""The gate by itself, forward and backward. Heads and channels are one flat axis of columns."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import GATE_SOFTPLUS, LARGEST, at_least, gate_rate, held, rate_sigmoid, rate_softplus, sigmoid

SHRINK = tl.constexpr(2.0**-16)
"""Terms of a span's sums are multiplied by this, so that the largest of them do not overflow."""


@triton.jit
def _load(g, A_log, dt_bias, row, col, rows, COLS, K):
    """``g + dt_bias`` and ``exp(A_log)`` of a block, with the block's offsets and mask."""
    inside = (row < rows)[:, None] & (col < COLS)[None, :]
    at = row.to(tl.int64)[:, None] * COLS + col[None, :]
    x = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    if dt_bias is not None:
        x += held(tl.load(dt_bias + col, mask=col < COLS, other=0.0).to(tl.float32))[None, :]
    rate = tl.full(col.shape, 1.0, tl.float32)
    if A_log is not None:
        rate = gate_rate(tl.load(A_log + col // K, mask=col < COLS, other=0.0))
    return x, rate[None, :], at, inside


@triton.jit
def log_softplus(x, rate):
    """The natural-log decay of the unbounded gate."""
    return at_least(-rate_softplus(x, rate), -LARGEST)


@triton.jit(do_not_specialize=["rows", "COLS", "K"])
def gate_kernel(
    g, A_log, dt_bias, log_decay, rows, COLS, K, lower_bound,
    GATE: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Natural-log decays in float32. Grid: blocks of R rows, blocks of BC columns; ``COLS = HV * K``."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    x, rate, at, inside = _load(g, A_log, dt_bias, row, col, rows, COLS, K)
    if GATE == GATE_SOFTPLUS:
        y = log_softplus(x, rate)
    else:
        y = lower_bound * sigmoid(rate * held(x))
    tl.store(log_decay + at, y, mask=inside)


@triton.jit(do_not_specialize=["rows", "COLS", "K", "SPAN"])
def gate_backward_kernel(
    g, A_log, dt_bias, dlog_decay, dg, dA_part, dbias_part, rows, COLS, K, SPAN, lower_bound,
    GATE: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """``dg``, at most MOST, and per span of rows and column the sums that make ``dA_log`` and ``ddt_bias``.

    Grid: spans of SPAN rows, blocks of BC columns. ``dA_part``, ``dbias_part``: ``[spans, COLS]`` float32, times
    :data:`SHRINK`, or None.
    """
    col = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * SPAN
    end = tl.minimum(first + SPAN, rows)
    drate = tl.zeros([BC], tl.float32)
    dbias = tl.zeros([BC], tl.float32)
    for r0 in tl.range(first, end, R):
        row = r0 + tl.arange(0, R)
        x, rate, at, inside = _load(g, A_log, dt_bias, row, col, end, COLS, K)
        dlog = tl.load(dlog_decay + at, mask=inside, other=0.0).to(tl.float32)
        if GATE == GATE_SOFTPLUS:
            dx = dlog * -rate_sigmoid(x, rate)
            da = dlog * log_softplus(x, rate)
        else:
            # The slope is 0 where the rate or the product with it is largest: no factor may be infinite.
            z = held(rate * held(x))
            slope = sigmoid(z) * sigmoid(-z)
            dlog = held(dlog * lower_bound)
            dx = (slope * rate) * dlog
            da = (slope * z) * dlog
        dx = tl.where(inside, held(dx), 0.0)
        da = tl.where(inside, held(da), 0.0)
        stored = tl.clamp(dx, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(dg + at, stored.to(dg.dtype.element_ty), mask=inside)
        dbias += tl.sum(dx * SHRINK, 0)
        drate += tl.sum(da * SHRINK, 0)
    out = tl.program_id(0).to(tl.int64) * COLS + col
    if dA_part is not None:
        tl.store(dA_part + out, drate, mask=col < COLS)
    if dbias_part is not None:
        tl.store(dbias_part + out, dbias, mask=col < COLS)
