"""The operand tiles of the chunk backward where one constant exponent offset serves half a chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_io import load_rows
from .chunk_backward_sums import split_bf16, sum_rows, tf32_rounded
from .common import exp2


@triton.jit
def store_operands(
    inputs, operands, tiles, step, upto, after_row, b, rq, rk, before, after, scale, centre, at, cols, out,
    SIZE: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Stores the operand tiles of SIZE rows at the offsets ``out``; returns zq, zb, yk, sk as rounded.

    ``upto``, ``after_row``: which rows' steps (columns) lie between a row and its half's first or last row.
    ``before``, ``after``: the decays from the chunk's first row to the half, and from the half to the chunk's end.
    """
    kind = operands.zb.dtype.element_ty
    hi, lo = split_bf16(step, DOT)
    P = sum_rows(upto, hi, lo, DOT) + centre
    up = exp2(P, ASM)
    before = before * tl.exp2(-centre)
    kt = (
        load_rows(inputs.k, at.start, at.rows, at.H * at.K, at.h * at.K, cols, at.K, SIZE).to(tl.float32)
        * rk[:, None]
    )
    y = tf32_rounded(kt * exp2(-P, ASM), DOT).to(kind)
    tl.store(operands.yk + out, y)
    s = kt * exp2(sum_rows(after_row, hi, lo, DOT), ASM)
    tl.store(tiles.kg + out, (s * after).to(kind))
    s = tf32_rounded(s, DOT).to(kind)
    tl.store(operands.sk + out, s)
    kt *= up * b[:, None]
    # w holds beta k 2^gc until the inverse is known.
    tl.store(tiles.w + out, (kt * before).to(kind))
    kt = tf32_rounded(kt, DOT).to(kind)
    tl.store(operands.zb + out, kt)
    qt = load_rows(inputs.q, at.start, at.rows, at.H * at.K, at.h * at.K, cols, at.K, SIZE)
    qt = qt.to(tl.float32) * rq[:, None] * up
    tl.store(tiles.qg + out, (qt * before * scale).to(kind))
    qt = tf32_rounded(qt, DOT).to(kind)
    tl.store(operands.zq + out, qt)
    return qt, kt, y, s
