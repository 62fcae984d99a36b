"""Rows behind a pack: tokens from ``cu_seqlens[N]`` to T belong to no sequence, and results there are zero.

Programs of chunk slots that no chunk owns (see :func:`.common.sequence_of_slot`) have nothing else to do. Those behind
the last chunk are given C rows each. With one slot more than the ``T // C + N`` of the chunks there are enough of them
for every row, whatever the offsets.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_row_past(cu_seqlens, N, slot, C: tl.constexpr):
    """The first of the C rows behind a pack that belong to a slot without a chunk; a large number for none."""
    bos = tl.load(cu_seqlens + N - 1).to(tl.int64)
    end = tl.load(cu_seqlens + N).to(tl.int64)
    free = slot - (bos // C + N - 1 + (end - bos + C - 1) // C)
    return tl.where(free >= 0, end + free * C, 2**62)


@triton.jit
def store_zero_rows(x, first, T, stride, at, width, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Zeros in ``x[first + r, at : at + width]`` for r < ROWS, up to row T. ``WIDTH``: width padded, at most 512."""
    WIDE: tl.constexpr = WIDTH if WIDTH <= 128 else 256 if WIDTH <= 256 else 512  # a power of two
    TILE: tl.constexpr = 512 // WIDE  # rows at a time, for few registers
    r = tl.arange(0, TILE)
    c = tl.arange(0, WIDE)
    for row in tl.range(first, tl.minimum(first + ROWS, T), TILE, num_stages=1):
        inside = (row + r < tl.minimum(first + ROWS, T))[:, None] & (c < width)[None, :]
        p = x + (row + r)[:, None] * stride + at + c[None, :]
        tl.store(p, tl.zeros([TILE, WIDE], x.dtype.element_ty), mask=inside)
