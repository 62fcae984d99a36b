"""Inverse of a unit lower triangular matrix by merging blocks of 1, 2, 4, ... rows.

Each merge is exact block elimination, so the error stays that of forward substitution. A power series
in the strictly lower part would be as short, but its terms cancel catastrophically for near-collinear
keys. The two functions differ in what they mask: the products of a level (forward and stages), or a factor of
the first product (backward).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import mma


@triton.jit
def unit_lower_inverse(low, i, DOT: tl.constexpr, LEVELS: tl.constexpr):
    """``(I + low)^-1`` for a strictly lower ``low`` of ``2^LEVELS`` rows; ``i`` counts them. float32 in and out.

    While ``x`` is block diagonal, block (a, b) of ``x low x`` is ``x_a low_ab x_b``: masking that product to the
    pairs of blocks merged at this level gives every merge of the level at once.
    """
    gap = i[:, None] ^ i[None, :]
    x = tl.where(gap == 0, 1.0, tl.where(gap == 1, -low, 0.0))
    for n in tl.range(1, LEVELS):
        x -= tl.where((gap >> n) == 1, mma(mma(x, low, DOT), x, DOT), 0.0)
    return x


@triton.jit
def pairs_of(level, SIZE: tl.constexpr):
    """``[SIZE, SIZE]`` mask of the pairs ``i > j`` in the two halves of one group of ``2 * 2**level`` rows."""
    half = tl.arange(0, SIZE) >> level
    sibling = tl.where((half & 1) == 1, half ^ 1, -1)
    return sibling[:, None] == half[None, :]


@triton.jit
def unit_lower_inverse_masked(A, LEVELS: tl.constexpr, SIZE: tl.constexpr, DOT: tl.constexpr):
    """``(I + A)^-1`` of a strictly lower triangular ``[SIZE, SIZE]`` tile, halves merged from 1 row up."""
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    inv = tl.where(i == j, 1.0, 0.0) - tl.where(pairs_of(0, SIZE), A, 0.0)
    for level in range(1, LEVELS):
        below = mma(tl.where(pairs_of(level, SIZE), A, 0.0), inv, DOT)
        inv -= mma(inv, below, DOT)
    return inv
