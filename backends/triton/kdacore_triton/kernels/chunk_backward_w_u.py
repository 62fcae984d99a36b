"""The end of the chunk backward's prepare kernels whose chunk is one tile: the products with the inverse."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_io import load_rows
from .common import mma


@triton.jit
def store_w_u(
    inverse, tiles, v, b, chunk, at,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Stores ``inverse @ w`` in the place of w, and ``(inverse @ (beta v))^T`` in uT; chunk-major tiles."""
    w, uT = tiles.w, tiles.uT
    r = tl.arange(0, C)
    for first in range(0, KP, BK):
        wide = chunk * (C * KP) + r[:, None] * KP + first + tl.arange(0, BK)[None, :]
        tl.store(w + wide, mma(inverse, tl.load(w + wide), DOT).to(w.dtype.element_ty))
    inverse = tl.trans(inverse)
    for first in range(0, VP, BV):
        cols = first + tl.arange(0, BV)
        vt = (
            load_rows(v, at.start, at.rows, at.HV * at.V, at.hv * at.V, cols, at.V, C).to(tl.float32)
            * b[:, None]
        )
        ut = mma(tl.trans(vt.to(uT.dtype.element_ty)), inverse, DOT)
        tl.store(uT + chunk * (VP * C) + cols[:, None] * C + r[None, :], ut.to(uT.dtype.element_ty))
