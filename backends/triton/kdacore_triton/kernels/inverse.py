"""Inverse of a unit lower triangular matrix by merging blocks of 1, 2, 4, ... rows.

Each merge is exact block elimination, so the error stays that of forward substitution. A power series in the
strictly lower part would be as short, but its terms cancel catastrophically for near-collinear keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import mma


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
