"""``prepare`` for gates without a lower bound: dyadic exponent anchors, every factor at most 1.

Level by level, blocks of 2s rows are cut in half and anchored at the first row of the right half: its rows decay from
the anchor, the left half's rows decay up to it. One product a level gives all pairs (right row, left row); the
exponents are sums over short runs of steps, never differences of long ones, so any gate is safe.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import chunk_of_slot, exp2, gate_decay, mma, operand
from kdacore_triton.kernels.inverse import unit_lower_inverse
from kdacore_triton.kernels.rows import load_beta, load_gate_bias, load_gate_rate, load_rows


@triton.jit
def level_steps(i, s):
    """0/1 matrix: whose steps (columns) lie between a row and the anchor of its block of 2s rows."""
    row = i[:, None]
    col = i[None, :]
    first = row & (-s)
    right = (row & s) != 0
    return (right & (col > first) & (col <= row)) | ((row & s == 0) & (col > row) & (col <= first + s))


@triton.jit
def partial_sums(take, hi, lo, DOT: tl.constexpr):
    """``take @ g``, sums over chosen rows, with ``g`` in two parts as :func:`split` gives them.

    Two bfloat16 parts keep 16 bits of g: an error of 2^-17 x in an exponent x <= 0 costs at most 2^-17 of 2^x.
    """
    if DOT == "bf16":
        t = take.to(tl.bfloat16)
        r = tl.dot(t, lo, acc=tl.dot(t, hi))
    else:
        r = tl.dot(take.to(tl.float32), hi, input_precision=DOT)
    return r


@triton.jit
def split(g, DOT: tl.constexpr):
    """``g`` as the operands of :func:`partial_sums`."""
    if DOT == "bf16":
        hi = g.to(tl.bfloat16)
        lo = (g - hi.to(tl.float32)).to(tl.bfloat16)
    else:
        hi = g
        lo = g
    return hi, lo


@triton.jit
def dyadic_pairs(q, k, hi, lo, i, C: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr):
    """``q_i . (k_j 2^(gc_i - gc_j))`` for i >= j, and the same of k and k for i > j."""
    gap = i[:, None] ^ i[None, :]
    lower = i[:, None] > i[None, :]
    aqk = tl.where(gap == 0, tl.sum(q * k, 1)[:, None], 0.0)
    akk = tl.zeros([C, C], tl.float32)
    s = 1
    while s < C:
        e = exp2(partial_sums(level_steps(i, s), hi, lo, DOT), ASM)
        kk = operand(k * e, DOT)
        keep = lower & (gap >= s) & (gap < 2 * s)
        aqk += tl.where(keep, mma(operand(q * e, DOT), tl.trans(kk), DOT), 0.0)
        akk += tl.where(keep, mma(kk, tl.trans(kk), DOT), 0.0)
        s *= 2
    return aqk, akk


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def prepare_dyadic_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    cu_ptr,
    rec_ptr,
    decay_ptr,
    T,
    NT,
    N,
    H,
    HV,
    scale,
    lower_bound,
    anchor,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    INV_DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid: slots * HV. Same arguments as the bounded kernel; ``anchor`` and ``BC`` are not used."""
    pid = tl.program_id(0).to(tl.int64)
    slot = pid // HV
    hv = pid - slot * HV
    h = hv // (HV // H)
    start, rows = chunk_of_slot(cu_ptr, slot.to(tl.int32), N, T, NT, C, PACKED)
    if rows <= 0:
        return

    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    inside = i < rows
    token = start + i
    whole = inside[:, None] & (d < K)[None, :]
    tile = slot * HV + hv
    rec = rec_ptr + tile * (C * (3 * BK + BV + C))
    kind = rec_ptr.dtype.element_ty
    out = i[:, None] * BK + d[None, :]

    x = tl.load(g_ptr + (token * HV + hv)[:, None] * K + d[None, :], mask=whole, other=0.0).to(tl.float32)
    x += load_gate_bias(bias_ptr, hv, d, K, BK)
    g = tl.where(whole, gate_decay(x, load_gate_rate(a_log_ptr, hv), lower_bound, GATE, ASM), 0.0)
    tl.store(decay_ptr + tile * BK + d, tl.exp2(tl.sum(g, 0)))
    hi, lo = split(g, DOT)
    k = load_rows(k_ptr, token, inside, h, H, d, K, L2NORM)
    q = load_rows(q_ptr, token, inside, h, H, d, K, L2NORM) * scale
    beta = load_beta(beta_ptr, token, inside, hv, HV, BETA_SIGMOID, BETA_FACTOR)

    upto = i[None, :] <= i[:, None]
    e_in = exp2(partial_sums(upto, hi, lo, DOT), ASM)
    tl.store(rec + out, (q * e_in).to(kind))
    kw = operand(k * e_in * beta[:, None], DOT)
    e_out = exp2(partial_sums(i[None, :] > i[:, None], hi, lo, DOT), ASM)
    tl.store(rec + C * BK + out, (k * e_out).to(kind))

    aqk, akk = dyadic_pairs(q, k, hi, lo, i, C, DOT, ASM)
    square = i[:, None] * C + i[None, :]
    tl.store(rec + C * (3 * BK + BV) + square, aqk.to(kind))
    x_inv = operand(unit_lower_inverse(akk * beta[:, None], i, INV_DOT, C), DOT)
    tl.store(rec + 2 * C * BK + out, mma(x_inv, kw, DOT).to(kind))
    for v0 in tl.range(0, BV, BU):
        c = v0 + tl.arange(0, BU)
        v = tl.load(
            v_ptr + (token * HV + hv)[:, None] * V + c[None, :],
            mask=inside[:, None] & (c < V)[None, :],
            other=0.0,
        )
        u = mma(x_inv, operand(v.to(tl.float32) * beta[:, None], DOT), DOT)
        tl.store(rec + 3 * C * BK + c[None, :] * C + i[:, None], u.to(kind))
