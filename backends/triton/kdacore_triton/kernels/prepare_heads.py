"""The decayed products of a chunk's rows, ``q_i . (k_j 2^(gc_i - gc_j))`` and the same of k and k.

Naively ``2^gc_i`` underflows and ``2^-gc_j`` overflows: there is one way around that for each kind of gate. Each head
also stores the chunk's total decay and its rows qg, kg, and, in w's place, ``beta k 2^gc``. It returns the two
``[C, C]`` products; their entries above the diagonal are junk. No later row changes a bit of an earlier one's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import GATE_LOG, exp2, gate_decay, mma_acc, operand
from kdacore_triton.kernels.sums import step_operand, sums_over


@triton.jit
def _block(ptr, row, inside, d, K: tl.constexpr, other):
    """Channels ``d`` of the rows that start at offsets ``row``; ``other`` outside."""
    return tl.load(ptr + row[:, None] + d[None, :], mask=inside[:, None] & (d < K)[None, :], other=other)


@triton.jit
def _steps(
    g_ptr, row, inside, d, K: tl.constexpr, a_exp, bias_ptr, hv, lower_bound,
    GATE: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """log2 decays of a block of channels, as an operand of sums; 0 outside."""
    # What the gate turns into no decay at all needs no mask afterwards.
    NONE: tl.constexpr = 0.0 if GATE == GATE_LOG else float("-inf")
    x = _block(g_ptr, row, inside, d, K, NONE).to(tl.float32)
    bias = tl.zeros([1, d.shape[0]], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + hv * K + d, mask=d < K, other=0.0).to(tl.float32)[None, :]
    return step_operand(gate_decay(x, a_exp, bias, lower_bound, GATE, DOT == "bf16", ASM), DOT)


@triton.jit
def _norm(squares):
    return 1.0 / tl.sqrt(squares + 1e-6)


@triton.jit
def _norms(
    q_ptr, k_ptr, row, inside, scale, K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, C: tl.constexpr,
    L2NORM: tl.constexpr,
):  # fmt: skip
    """Per row: what q is multiplied with (its scale included), and what k is."""
    q_norm = tl.full([C], 1.0, tl.float32) * scale
    k_norm = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        qq = tl.zeros([C], tl.float32)
        kk = tl.zeros([C], tl.float32)
        for d0 in tl.range(0, BK, BS):
            d = d0 + tl.arange(0, BS)
            q = _block(q_ptr, row, inside, d, K, 0.0).to(tl.float32)
            k = _block(k_ptr, row, inside, d, K, 0.0).to(tl.float32)
            qq += tl.sum(q * q, 1)
            kk += tl.sum(k * k, 1)
        q_norm *= _norm(qq)
        k_norm = _norm(kk)
    return q_norm, k_norm


@triton.jit
def bounded_head(
    q_ptr, k_ptr, g_ptr, bias_ptr, rec, decay_ptr, qk_row, g_row, inside, beta, a_exp, hv, scale, lower_bound, anchor,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """For gates of at least -5 a step and at most 32 rows: one constant anchor.

    Every running sum lies within about ``anchor`` of ``-anchor``, so both factors fit the range of bfloat16 whatever
    the gates are, and one product gives the whole chunk. ``anchor`` is an integer: scaling by it is exact.
    """
    i = tl.arange(0, C)
    kind = rec.dtype.element_ty
    q_norm, k_norm = _norms(q_ptr, k_ptr, qk_row, inside, scale, K, BK, BS, C, L2NORM)
    unit = tl.exp2(-anchor)
    upto = i[None, :] <= i[:, None]
    aqk = tl.zeros([C, C], tl.float32)
    akk = tl.zeros([C, C], tl.float32)
    for d0 in tl.range(0, BK, BS):
        d = d0 + tl.arange(0, BS)
        steps = _steps(g_ptr, g_row, inside, d, K, a_exp, bias_ptr, hv, lower_bound, GATE, DOT, ASM)
        total = tl.sum(steps.to(tl.float32), 0)
        tl.store(decay_ptr + d, exp2(total, ASM))
        gc = sums_over(upto, steps, DOT) + anchor
        up = exp2(gc, ASM)
        qs = _block(q_ptr, qk_row, inside, d, K, 0.0).to(tl.float32) * q_norm[:, None] * up
        k = _block(k_ptr, qk_row, inside, d, K, 0.0).to(tl.float32) * k_norm[:, None]
        ka = k * up
        ks = k * exp2(-gc, ASM)
        kt = tl.trans(operand(ks, DOT))
        aqk = mma_acc(operand(qs, DOT), kt, aqk, DOT)
        akk = mma_acc(operand(ka, DOT), kt, akk, DOT)
        out = i[:, None] * BK + d[None, :]
        tl.store(rec + out, (qs * unit).to(kind))
        tl.store(rec + C * BK + out, (ks * exp2(total + anchor, ASM)[None, :]).to(kind))
        tl.store(rec + 2 * C * BK + out, (ka * (beta * unit)[:, None]).to(kind))
    return aqk, akk


@triton.jit
def dyadic_head(
    q_ptr, k_ptr, g_ptr, bias_ptr, levels_ptr, rec, decay_ptr, qk_row, g_row, inside, beta, a_exp, hv, scale, lower_bound,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """For any gate: every factor is at most 1.

    Level by level, blocks of rows are cut in half and anchored at the first row of the right half. One product a
    level gives all pairs (right row, left row). Exponents are sums over short runs of steps, never differences of
    long ones. ``levels_ptr``: 0/1 matrices ``[LEVELS, C, C]``, whose steps (columns) lie between a row and its anchor;
    ``C = 2^LEVELS``. The steps wait in kg's place of the record.
    """
    i = tl.arange(0, C)
    kind = rec.dtype.element_ty
    qq = tl.zeros([C], tl.float32)
    kk = tl.zeros([C], tl.float32)
    qk = tl.zeros([C], tl.float32)
    for d0 in tl.range(0, BK, BS):
        d = d0 + tl.arange(0, BS)
        steps = _steps(g_ptr, g_row, inside, d, K, a_exp, bias_ptr, hv, lower_bound, GATE, DOT, ASM)
        tl.store(decay_ptr + d, exp2(tl.sum(steps.to(tl.float32), 0), ASM))
        tl.store(rec + C * BK + i[:, None] * BK + d[None, :], steps.to(kind, bitcast=True))
        q = _block(q_ptr, qk_row, inside, d, K, 0.0).to(tl.float32)
        k = _block(k_ptr, qk_row, inside, d, K, 0.0).to(tl.float32)
        qk += tl.sum(q * k, 1)
        if L2NORM:
            qq += tl.sum(q * q, 1)
            kk += tl.sum(k * k, 1)
    q_norm = tl.full([C], 1.0, tl.float32) * scale
    k_norm = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        q_norm *= _norm(qq)
        k_norm = _norm(kk)
    tl.debug_barrier()

    steps_type: tl.constexpr = tl.float16 if DOT == "bf16" else tl.float32
    gap = i[:, None] ^ i[None, :]
    aqk = tl.where(gap == 0, qk[:, None], 0.0)
    akk = tl.zeros([C, C], tl.float32)
    for n in tl.range(0, LEVELS):
        take = tl.load(levels_ptr + n * C * C + i[:, None] * C + i[None, :])
        dqk = tl.zeros([C, C], tl.float32)
        dkk = tl.zeros([C, C], tl.float32)
        for d0 in tl.range(0, BK, BS):
            d = d0 + tl.arange(0, BS)
            steps = tl.load(rec + C * BK + i[:, None] * BK + d[None, :]).to(steps_type, bitcast=True)
            e = exp2(sums_over(take, steps, DOT), ASM)
            k = operand(_block(k_ptr, qk_row, inside, d, K, 0.0).to(tl.float32) * e, DOT)
            q = operand(_block(q_ptr, qk_row, inside, d, K, 0.0).to(tl.float32) * e, DOT)
            dqk = mma_acc(q, tl.trans(k), dqk, DOT)
            dkk = mma_acc(k, tl.trans(k), dkk, DOT)
        keep = (gap >> n) == 1
        aqk = tl.where(keep, dqk, aqk)
        akk = tl.where(keep, dkk, akk)

    upto = i[None, :] <= i[:, None]
    after = i[None, :] > i[:, None]
    for d0 in tl.range(0, BK, BS):
        d = d0 + tl.arange(0, BS)
        out = i[:, None] * BK + d[None, :]
        steps = tl.load(rec + C * BK + out).to(steps_type, bitcast=True)
        e = exp2(sums_over(upto, steps, DOT), ASM)
        k = _block(k_ptr, qk_row, inside, d, K, 0.0).to(tl.float32) * k_norm[:, None]
        q = _block(q_ptr, qk_row, inside, d, K, 0.0).to(tl.float32) * q_norm[:, None]
        kg = k * exp2(sums_over(after, steps, DOT), ASM)
        tl.debug_barrier()
        tl.store(rec + out, (q * e).to(kind))
        tl.store(rec + C * BK + out, kg.to(kind))
        tl.store(rec + 2 * C * BK + out, (k * e * beta[:, None]).to(kind))
    return aqk * (q_norm[:, None] * k_norm[None, :]), akk * (k_norm[:, None] * k_norm[None, :])


@triton.jit
def scalar_head(
    q_ptr, k_ptr, g_ptr, bias_ptr, rec, decay_ptr, qk_row, g_row, inside, beta, a_exp, hv, scale, lower_bound,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One decay a head: between two rows it is one number, so plain products are scaled afterwards."""
    i = tl.arange(0, C)
    kind = rec.dtype.element_ty
    q_norm, k_norm = _norms(q_ptr, k_ptr, qk_row, inside, scale, K, BK, BS, C, L2NORM)
    NONE: tl.constexpr = 0.0 if GATE == GATE_LOG else float("-inf")
    x = tl.load(g_ptr + g_row, mask=inside, other=NONE).to(tl.float32)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + hv).to(tl.float32)
    g = gate_decay(x, a_exp, bias, lower_bound, GATE, False, ASM)
    gc = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    tl.store(decay_ptr, tl.exp2(total))
    e_in = exp2(gc, ASM)
    e_out = exp2(total - gc, ASM)
    aqk = tl.zeros([C, C], tl.float32)
    akk = tl.zeros([C, C], tl.float32)
    for d0 in tl.range(0, BK, BS):
        d = d0 + tl.arange(0, BS)
        q = _block(q_ptr, qk_row, inside, d, K, 0.0).to(tl.float32) * q_norm[:, None]
        k = _block(k_ptr, qk_row, inside, d, K, 0.0).to(tl.float32) * k_norm[:, None]
        kt = tl.trans(operand(k, DOT))
        aqk = mma_acc(operand(q, DOT), kt, aqk, DOT)
        akk = mma_acc(operand(k, DOT), kt, akk, DOT)
        out = i[:, None] * BK + d[None, :]
        tl.store(rec + out, (q * e_in[:, None]).to(kind))
        tl.store(rec + C * BK + out, (k * e_out[:, None]).to(kind))
        tl.store(rec + 2 * C * BK + out, (k * (e_in * beta)[:, None]).to(kind))
    ratio = exp2(tl.where(i[:, None] >= i[None, :], gc[:, None] - gc[None, :], 0.0), ASM)
    return aqk * ratio, akk * ratio
