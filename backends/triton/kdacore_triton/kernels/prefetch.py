"""Prefetches of tiles into the L2 cache, before they are loaded. NVIDIA only.

Where registers allow one program per multiprocessor, no other program's work hides a load, and the
compiler moves no load across a barrier. A prefetch needs no register and is never waited for: tiles
prefetched at a program's start are in the L2 when they are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(128)
"""Bytes of an L2 line."""


@triton.jit
def prefetch(p):
    """Prefetches the cache line of every address in ``p``."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l",
        [p.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_tile(x, SIZE: tl.constexpr):
    """``SIZE`` adjacent elements; a power of two."""
    PER_LINE: tl.constexpr = LINE // (x.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (SIZE + PER_LINE - 1) // PER_LINE
    prefetch(x + tl.arange(0, LINES) * PER_LINE)


@triton.jit
def prefetch_inputs(inputs, at, KP: tl.constexpr, VP: tl.constexpr, SIZE: tl.constexpr):
    """Up to SIZE rows of the q, k, g and v of one value head."""
    prefetch_rows(inputs.q, at.start, at.rows, at.H * at.K, at.h * at.K, at.K, KP, SIZE)
    prefetch_rows(inputs.k, at.start, at.rows, at.H * at.K, at.h * at.K, at.K, KP, SIZE)
    prefetch_rows(inputs.g, at.start, at.rows, at.HV * at.K, at.hv * at.K, at.K, KP, SIZE)
    prefetch_rows(inputs.v, at.start, at.rows, at.HV * at.V, at.hv * at.V, at.V, VP, SIZE)


@triton.jit
def prefetch_rows(x, start, rows, row_stride, first, width, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The tile ``x[start + r, first + c]``, c < width, of up to SIZE rows; ``WIDTH``: width padded."""
    PER_LINE: tl.constexpr = LINE // (x.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (WIDTH + PER_LINE - 1) // PER_LINE
    r = tl.minimum(tl.arange(0, SIZE), rows - 1)
    c = tl.minimum(tl.arange(0, LINES) * PER_LINE, width - 1)
    prefetch(x + start * row_stride + first + r[:, None] * row_stride + c[None, :])
