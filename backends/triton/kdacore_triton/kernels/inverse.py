"""Inverse of a unit lower triangular matrix by merging blocks of 1, 2, 4, ... rows.

Each merge is exact block elimination, so the error stays that of forward substitution. A power series in the
strictly lower part would be as short, but its terms cancel catastrophically for near-collinear keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import mma


@triton.jit
def unit_lower_inverse(low, i, DOT: tl.constexpr, C: tl.constexpr):
    """``(I + low)^-1`` for a strictly lower ``low`` of C rows; ``i`` is ``arange(C)``. float32 in and out.

    While ``x`` is block diagonal, block (a, b) of ``x low x`` is ``x_a low_ab x_b``: masking that product to the
    pairs of blocks merged at this level gives every merge of the level at once.
    """
    gap = i[:, None] ^ i[None, :]
    x = tl.where(gap == 0, 1.0, tl.where(gap == 1, -low, 0.0))
    s = 2
    while s < C:
        x -= tl.where((gap >= s) & (gap < 2 * s), mma(mma(x, low, DOT), x, DOT), 0.0)
        s *= 2
    return x


@triton.jit
def merge_inverse(x1, low10, x0, DOT: tl.constexpr):
    """The lower left block of the inverse of ``[[a0, 0], [low10, a1]]``, given ``x0 = a0^-1`` and ``x1 = a1^-1``."""
    return -mma(mma(x1, low10, DOT), x0, DOT)
