"""The decayed products of a chunk's rows: ``q_i . (k_j 2^(gc_i - gc_j))``, and the same of k and k.

Computed directly, ``2^gc_i`` underflows and ``2^-gc_j`` overflows. There is one remedy for each family
of gates. Each function returns the two ``[C, C]`` products, whose entries above the diagonal are
undefined, and the rows ``q 2^gc``, ``k 2^(gc_last - gc)`` and ``beta k 2^gc``. No later row changes a bit
of an earlier one's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import exp2, mma, operand
from .step_sums import sum_steps


@triton.jit
def bounded_products(q, k, beta, steps, total, i, offset, DOT: tl.constexpr, ASM: tl.constexpr):
    """For log decays of at least -5 per step and at most 32 rows: one constant exponent offset.

    Every running sum lies within about ``offset`` of ``-offset``, so both factors fit the range of bfloat16 with any
    gates, and one product gives the whole chunk. ``offset`` is an integer: scaling by it is exact.
    """
    unit = tl.exp2(-offset)
    gc = sum_steps(i[None, :] <= i[:, None], steps, DOT) + offset
    up = exp2(gc, ASM)
    ks = k * exp2(-gc, ASM)
    k *= up
    q *= up
    kt = tl.trans(operand(ks, DOT))
    aqk = mma(operand(q, DOT), kt, DOT)
    akk = mma(operand(k, DOT), kt, DOT)
    return aqk, akk, q * unit, ks * exp2(total + offset, ASM)[None, :], k * (beta * unit)[:, None]


@triton.jit
def unbounded_products(
    q, k, beta, steps, i, levels, C: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """For any gate: every factor is at most 1.

    At each level, blocks of rows are cut in half, and exponents are relative to the first row of the second half. One
    product per level gives all pairs (row of the second half, row of the first half). Exponents are sums over short
    runs of steps, never differences of long ones. ``levels``: 0/1 matrices ``[LEVELS, C, C]`` that choose the steps
    (columns) between a row and its reference row; ``C = 2^LEVELS``.
    """
    gap = i[:, None] ^ i[None, :]
    aqk = tl.where(gap == 0, tl.sum(q * k, 1)[:, None], 0.0)
    akk = tl.zeros([C, C], tl.float32)
    for n in tl.range(0, LEVELS):
        take = tl.load(levels + n * C * C + i[:, None] * C + i[None, :])
        e = exp2(sum_steps(take, steps, DOT), ASM)
        kk = operand(k * e, DOT)
        keep = (gap >> n) == 1
        aqk = tl.where(keep, mma(operand(q * e, DOT), tl.trans(kk), DOT), aqk)
        akk = tl.where(keep, mma(kk, tl.trans(kk), DOT), akk)
    e = exp2(sum_steps(i[None, :] <= i[:, None], steps, DOT), ASM)
    kg = k * exp2(sum_steps(i[None, :] > i[:, None], steps, DOT), ASM)
    return aqk, akk, q * e, kg, k * e * beta[:, None]


@triton.jit
def scalar_products(q, k, beta, g, total, i, DOT: tl.constexpr, ASM: tl.constexpr):
    """One decay per head: between two rows it is one number, so plain products are scaled afterwards."""
    gc = tl.cumsum(g, 0)
    kt = tl.trans(operand(k, DOT))
    ratio = exp2(tl.where(i[:, None] >= i[None, :], gc[:, None] - gc[None, :], 0.0), ASM)
    aqk = mma(operand(q, DOT), kt, DOT) * ratio
    akk = mma(operand(k, DOT), kt, DOT) * ratio
    e = exp2(gc, ASM)
    return aqk, akk, q * e[:, None], k * exp2(total - gc, ASM)[:, None], k * (e * beta)[:, None]
