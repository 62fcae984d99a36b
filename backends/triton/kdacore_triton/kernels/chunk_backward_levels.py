"""Pairs of one half chunk, level by level, in the channel-gate gradients; tiles ``[channels, 32 tokens]``.

With channels as rows, every matrix product takes its large operand from registers and a small
``[32, 32]`` one from shared memory, and four tiles of sums fit in the registers at once.

A pair of tokens ``i > j`` of one half belongs to exactly one *level* l in 0..4: both lie in one group
of ``2 * 2**l`` tokens, j in its first half, i in its second half. With the *boundary* b, the last
token of that first half,

    2^(gc_i - gc_j) = 2^(gc_i - gc_b) * 2^(gc_b - gc_j),        j <= b < i.

Neither exponent is positive, so nothing overflows with any gate, and no token after i takes part. One
factor per token and level serves both roles: it decays from the boundary for a token after it, and to
the boundary for a token before it. The exponents are sums of the steps between, taken on the matrix
unit; long sums are never subtracted from each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_sums import rounded, sum_tokens
from .common import exp2, mma

S = tl.constexpr(32)
"""Tokens of half a chunk."""
HALF_LEVELS = tl.constexpr(5)


@triton.jit
def block(x, row, col):
    """The ``[S, S]`` block at (row, col) of a ``[2 S, 2 S]`` tile."""
    t = tl.arange(0, S)
    return tl.load(x + row * (2 * S) + col + t[:, None] * (2 * S) + t[None, :])


@triton.jit
def store_block(x, value, row, col):
    """Inverse of :func:`block`."""
    t = tl.arange(0, S)
    at = row * (2 * S) + col + t[:, None] * (2 * S) + t[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty))


@triton.jit
def level_grads(
    q, k, b, hi, lo, pairs_q, pairs_k, dq, x, col, dgc, DOT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Adds what the pairs inside one half give to dq, x, col and dgc, all ``[BK, S]``.

    ``pairs_q``, ``pairs_k``: pointers to the half's diagonal blocks of the matrices of chunk_backward_grads_kernel.
    """
    t = tl.arange(0, S)[:, None]
    r = tl.arange(0, S)[None, :]
    square = t * (2 * S) + r
    for level in range(HALF_LEVELS):
        last = ((r >> (level + 1)) << (level + 1)) + (1 << level) - 1
        f = exp2(sum_tokens(hi, lo, ((t > last) & (t <= r)) | ((t > r) & (t <= last)), DOT), ASM)
        siblings = (t >> level) == ((r >> level) ^ 1)
        right = ((r >> level) & 1) == 1
        is_right = tl.where(right, 1.0, 0.0)
        z = rounded(tl.where(right, q, k) * f, DOT)
        p = mma(z, tl.where(siblings, tl.load(pairs_q + square), 0.0), DOT)
        dgc += (2.0 * is_right - 1.0) * (z * p)
        p *= f
        dq += is_right * p
        col += (1.0 - is_right) * p
        z = rounded(tl.where(right, b, 1.0) * k * f, DOT)
        p = mma(z, tl.where(siblings, tl.load(pairs_k + square), 0.0), DOT)
        dgc += (2.0 * is_right - 1.0) * (z * p)
        p *= f
        x += is_right * p
        col += (1.0 - is_right) * p
    return dq, x, col, dgc
