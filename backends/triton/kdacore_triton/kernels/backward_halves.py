"""Device functions of the channel-gate gradients: 32 tokens of a chunk as a tile ``[channels, tokens]``.

With channels as rows, every matrix product takes its big operand from registers and a small ``[32, 32]`` one from
shared memory, and a tile costs few enough registers for four of them to be summed at once.

A pair of tokens ``i > j`` of one half belongs to exactly one *level* l in 0..4: both lie in one group of ``2 * 2**l``
tokens, j in its left half, i in its right half. With the *boundary* b, the last token of that left half,

    2^(gc_i - gc_j) = 2^(gc_i - gc_b) * 2^(gc_b - gc_j),        j <= b < i.

Neither exponent is positive, so nothing overflows however strong the gate, and no token after i takes part. One factor
a token and level serves both roles: a right token decays from the boundary, a left token to it. The exponents are
sums over the steps between, taken by the matrix unit, never differences of long sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import exp2, mma

S = tl.constexpr(32)
"""Tokens of half a chunk."""
HALF_LEVELS = tl.constexpr(5)

# Rows of ``row_values``, C float32 each: what there is one of a token and value head.
ROW_BETA = tl.constexpr(0)
"""beta as the recurrence uses it."""
ROW_RQ = tl.constexpr(1)
ROW_RK = tl.constexpr(2)
"""Reciprocal norms of q and k; with l2norm alone."""
ROW_DIAGONAL = tl.constexpr(3)
"""The diagonal of dAqk."""
ROW_DBETA = tl.constexpr(4)
"""dbeta from v; the rows after it: from the channels of each block."""


@triton.jit
def halves(x, DOT: tl.constexpr):
    """``x`` as a sum of two bfloat16 parts (17 bits), or ``x`` itself where dots take float32."""
    if DOT == "bf16":
        hi = x.to(tl.bfloat16)
        lo = (x - hi.to(tl.float32)).to(tl.bfloat16)
    else:
        hi = x
        lo = x
    return hi, lo


@triton.jit
def sum_tokens(hi, lo, which, DOT: tl.constexpr):
    """``out[:, r] = sum of x[:, t] over the t with which[t, r]``; ``hi, lo = halves(x)``."""
    if DOT == "bf16":
        ones = which.to(tl.bfloat16)
        r = tl.dot(lo, ones, acc=tl.dot(hi, ones))
    elif DOT == "tf32":
        r = tl.dot(hi, which.to(tl.float32), input_precision="tf32x3")
    else:
        r = tl.dot(hi, which.to(tl.float32), input_precision=DOT)
    return r


@triton.jit
def sum_all_bits(x, which, DOT: tl.constexpr):
    """:func:`sum_tokens` of ``x`` itself, for sums that end far below their terms: every bit of float32 counts."""
    if DOT == "bf16":
        hi, lo = halves(x, DOT)
        rest = (x - hi.to(tl.float32) - lo.to(tl.float32)).to(tl.bfloat16)
        r = tl.dot(hi, which.to(tl.bfloat16), acc=sum_tokens(lo, rest, which, DOT))
    else:
        r = sum_tokens(x, x, which, DOT)
    return r


@triton.jit
def rounded(x, DOT: tl.constexpr):
    """``x`` as a dot of precision DOT will see it, still float32, so that other products can use the same value."""
    if DOT == "bf16":
        # To nearest, ties away from zero: two integer operations, where a conversion there and back is slow.
        bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def tf32_rounded(x, DOT: tl.constexpr):
    """``x`` as a tf32 product will see it, where products are tf32: nearest, ties away from zero."""
    if DOT == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -8192
        x = bits.to(tl.float32, bitcast=True)
    return x


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

    ``pairs_q``, ``pairs_k``: pointers to the half's diagonal blocks of the matrices of grads_kernel.
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
