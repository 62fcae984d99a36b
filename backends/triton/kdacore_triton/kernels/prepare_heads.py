"""The decayed products of a chunk's rows, ``q_i . (k_j 2^(gc_i - gc_j))`` and the same of k and k.

Naively ``2^gc_i`` underflows and ``2^-gc_j`` overflows: there is one way around that for each kind of gate. Each head
also stores the chunk's total decay and its rows qg and kg. It returns the two ``[C, C]`` products, whose entries above
the diagonal are junk, and ``beta k 2^gc``. No later row changes a bit of an earlier one's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import exp2, gate_decay, mma, operand
from kdacore_triton.kernels.sums import step_operand, sums_over


@triton.jit
def bounded_head(
    q, k, g, bias, a_exp, lower_bound, beta, rec, decay_ptr, anchor,
    BK: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """For gates of at least -5 a step and at most 32 rows: one constant anchor.

    Every running sum lies within about ``anchor`` of ``-anchor``, so both factors fit the range of bfloat16 whatever
    the gates are, and one product gives the whole chunk. ``anchor`` is an integer: scaling by it is exact.
    """
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    kind = rec.dtype.element_ty
    out = i[:, None] * BK + d[None, :]
    unit = tl.exp2(-anchor)
    steps = step_operand(gate_decay(g, a_exp, bias, lower_bound, GATE, DOT == "bf16", ASM), DOT)
    total = tl.sum(steps.to(tl.float32), 0)
    tl.store(decay_ptr + d, exp2(total, ASM))
    gc = sums_over(i[None, :] <= i[:, None], steps, DOT) + anchor
    up = exp2(gc, ASM)
    ks = k * exp2(-gc, ASM)
    ka = k * up
    qs = q * up
    kt = tl.trans(operand(ks, DOT))
    aqk = mma(operand(qs, DOT), kt, DOT)
    akk = mma(operand(ka, DOT), kt, DOT)
    tl.store(rec + out, (qs * unit).to(kind))
    tl.store(rec + C * BK + out, (ks * exp2(total + anchor, ASM)[None, :]).to(kind))
    return aqk, akk, operand(ka * (beta * unit)[:, None], DOT)


@triton.jit
def dyadic_head(
    q, k, g, bias, a_exp, lower_bound, beta, rec, decay_ptr, levels_ptr,
    BK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """For any gate: every factor is at most 1.

    Level by level, blocks of rows are cut in half and anchored at the first row of the right half. One product a
    level gives all pairs (right row, left row). Exponents are sums over short runs of steps, never differences of
    long ones. ``levels_ptr``: 0/1 matrices ``[LEVELS, C, C]``, whose steps (columns) lie between a row and its anchor;
    ``C = 2^LEVELS``.
    """
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    kind = rec.dtype.element_ty
    out = i[:, None] * BK + d[None, :]
    steps = step_operand(gate_decay(g, a_exp, bias, lower_bound, GATE, DOT == "bf16", ASM), DOT)
    tl.store(decay_ptr + d, exp2(tl.sum(steps.to(tl.float32), 0), ASM))
    gap = i[:, None] ^ i[None, :]
    aqk = tl.where(gap == 0, tl.sum(q * k, 1)[:, None], 0.0)
    akk = tl.zeros([C, C], tl.float32)
    for n in tl.range(0, LEVELS):
        take = tl.load(levels_ptr + n * C * C + i[:, None] * C + i[None, :])
        e = exp2(sums_over(take, steps, DOT), ASM)
        kk = operand(k * e, DOT)
        keep = (gap >> n) == 1
        aqk = tl.where(keep, mma(operand(q * e, DOT), tl.trans(kk), DOT), aqk)
        akk = tl.where(keep, mma(kk, tl.trans(kk), DOT), akk)
    e = exp2(sums_over(i[None, :] <= i[:, None], steps, DOT), ASM)
    tl.store(rec + out, (q * e).to(kind))
    kw = operand(k * e * beta[:, None], DOT)
    e = exp2(sums_over(i[None, :] > i[:, None], steps, DOT), ASM)
    tl.store(rec + C * BK + out, (k * e).to(kind))
    return aqk, akk, kw


@triton.jit
def scalar_head(
    q, k, g, bias, a_exp, lower_bound, beta, rec, decay_ptr,
    BK: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One decay a head: between two rows it is one number, so plain products are scaled afterwards."""
    i = tl.arange(0, C)
    kind = rec.dtype.element_ty
    out = i[:, None] * BK + tl.arange(0, BK)[None, :]
    g = gate_decay(g, a_exp, bias, lower_bound, GATE, False, ASM)
    gc = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    tl.store(decay_ptr, tl.exp2(total))
    e = exp2(gc, ASM)
    tl.store(rec + out, (q * e[:, None]).to(kind))
    tl.store(rec + C * BK + out, (k * exp2(total - gc, ASM)[:, None]).to(kind))
    kt = tl.trans(operand(k, DOT))
    ratio = exp2(tl.where(i[:, None] >= i[None, :], gc[:, None] - gc[None, :], 0.0), ASM)
    aqk = mma(operand(q, DOT), kt, DOT) * ratio
    akk = mma(operand(k, DOT), kt, DOT) * ratio
    return aqk, akk, operand(k * (e * beta)[:, None], DOT)
