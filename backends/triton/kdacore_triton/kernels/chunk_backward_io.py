"""Loads and stores of rows that the kernels of the chunk backward share.

``SIZE`` is the number of rows of the tile, a chunk or half of one; ``rows`` is how many of them exist.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pack_tail import first_row_past, store_zero_rows

# Rows of ``row_values``, C float32 each: values with one number per token and value head.
ROW_BETA = tl.constexpr(0)
"""beta as the recurrence uses it."""
ROW_RQ = tl.constexpr(1)
ROW_RK = tl.constexpr(2)
"""Reciprocal norms of q and k; only with l2norm."""
ROW_DIAGONAL = tl.constexpr(3)
"""The diagonal of dAqk."""
ROW_DBETA = tl.constexpr(4)
"""dbeta from v. The rows after it hold dbeta from each block of channels."""


@triton.jit
def load_rows(x, start, rows, row_stride, first, cols, width, SIZE: tl.constexpr):
    """Tile ``x[start + r, first + cols]`` in the dtype of x; 0 past ``rows`` and ``width``."""
    r = tl.arange(0, SIZE)
    at = r[:, None] * row_stride + cols[None, :]
    inside = (r < rows)[:, None] & (cols < width)[None, :]
    return tl.load(x + start * row_stride + first + at, mask=inside, other=0.0)


@triton.jit
def store_rows(x, value, start, rows, row_stride, first, cols, width, SIZE: tl.constexpr):
    """Inverse of :func:`load_rows`, rounded to the array's dtype."""
    r = tl.arange(0, SIZE)
    at = r[:, None] * row_stride + cols[None, :]
    inside = (r < rows)[:, None] & (cols < width)[None, :]
    tl.store(x + start * row_stride + first + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def reciprocal_norms(q, k, at, KP: tl.constexpr, BK: tl.constexpr, SIZE: tl.constexpr):
    """``1 / sqrt(sum(x * x) + 1e-6)`` of SIZE rows of q and of k, in blocks of BK channels."""
    squares_q = tl.zeros([SIZE], tl.float32)
    squares_k = tl.zeros([SIZE], tl.float32)
    stride = at.H * at.K
    first = at.h * at.K
    for block in range(0, KP, BK):
        cols = block + tl.arange(0, BK)
        qt = load_rows(q, at.start, at.rows, stride, first, cols, at.K, SIZE).to(tl.float32)
        kt = load_rows(k, at.start, at.rows, stride, first, cols, at.K, SIZE).to(tl.float32)
        squares_q += tl.sum(qt * qt, 1)
        squares_k += tl.sum(kt * kt, 1)
    return 1.0 / tl.sqrt(squares_q + 1e-6), 1.0 / tl.sqrt(squares_k + 1e-6)


@triton.jit
def store_half_decays(last, chunk, cols, first_half, second_half, KP: tl.constexpr):
    """Stores the decays over a chunk and over each of its halves, as ``last [3, KP]``."""
    at = chunk * (3 * KP) + cols
    tl.store(last + at, first_half * second_half)
    tl.store(last + at + KP, first_half)
    tl.store(last + at + 2 * KP, second_half)


@triton.jit
def load_vector(x, start, rows, row_stride, first, SIZE: tl.constexpr):
    """float32 vector ``x[start + r, first]``; 0 past the sequence's end."""
    r = tl.arange(0, SIZE)
    return tl.load(x + start * row_stride + first + r * row_stride, mask=r < rows, other=0.0).to(tl.float32)


@triton.jit
def store_vector(x, value, start, rows, row_stride, first, SIZE: tl.constexpr):
    """Inverse of :func:`load_vector`."""
    r = tl.arange(0, SIZE)
    at = start * row_stride + first + r * row_stride
    tl.store(x + at, value.to(x.dtype.element_ty), mask=r < rows)


@triton.jit
def store_zero_grads(
    grads, cu_seqlens, N, slot, T, HV, hv, K, V,
    KP: tl.constexpr, VP: tl.constexpr, SCALAR_GATE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a program without a chunk: zeros in its share of the rows behind the pack."""
    first = first_row_past(cu_seqlens, N, slot, C)
    store_zero_rows(grads.dq, first, T, HV * K, hv * K, K, KP, C)
    store_zero_rows(grads.dk, first, T, HV * K, hv * K, K, KP, C)
    store_zero_rows(grads.dv, first, T, HV * V, hv * V, V, VP, C)
    if SCALAR_GATE:
        store_zero_rows(grads.dg, first, T, HV, hv, 1, 1, C)
    else:
        store_zero_rows(grads.dg, first, T, HV * K, hv * K, K, KP, C)
    store_zero_rows(grads.dbeta, first, T, HV, hv, 1, 1, C)
