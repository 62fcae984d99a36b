"""``prepare`` for bounded gates (every step's log decay >= -5): constant exponent anchors.

Rows are taken BC at a time, so few that every running sum of log2 decays stays within +-anchor of ``-anchor``. Then
``q 2^(gl + anchor)`` and ``k 2^(-gl - anchor)`` fit the range of bfloat16 whatever the gates are, and one product
gives a whole diagonal block. The constant knows no row, so no later row can change a bit of an earlier one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import chunk_of_slot, exp2, gate_decay, mma, mma_acc, operand
from kdacore_triton.kernels.inverse import merge_inverse, unit_lower_inverse
from kdacore_triton.kernels.rows import load_beta, load_gate_bias, load_gate_rate, load_rows


@triton.jit
def _gate(
    g_ptr,
    a_exp,
    bias,
    lower_bound,
    token,
    inside,
    hv,
    HV,
    d,
    K: tl.constexpr,
    GATE: tl.constexpr,
    ASM: tl.constexpr,
):
    """log2 decays of BC rows, their running sum and their sum."""
    whole = inside[:, None] & (d < K)[None, :]
    x = tl.load(g_ptr + (token * HV + hv)[:, None] * K + d[None, :], mask=whole, other=0.0).to(tl.float32)
    g = tl.where(whole, gate_decay(x + bias, a_exp, lower_bound, GATE, ASM), 0.0)
    return tl.cumsum(g, 0), tl.sum(g, 0)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def prepare_bounded_kernel(
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
    """Grid: slots * HV. ``C`` is BC or 2 BC; ``anchor`` an integer near half of BC steps at the bound, in log2.
    ``BU``: columns of v per step. What is written: :mod:`kdacore_triton.forward`."""
    pid = tl.program_id(0).to(tl.int64)
    slot = pid // HV
    hv = pid - slot * HV
    h = hv // (HV // H)
    start, rows = chunk_of_slot(cu_ptr, slot.to(tl.int32), N, T, NT, C, PACKED)
    if rows <= 0:
        return

    i = tl.arange(0, BC)
    d = tl.arange(0, BK)
    a_exp = load_gate_rate(a_log_ptr, hv)
    bias = load_gate_bias(bias_ptr, hv, d, K, BK)

    tile = slot * HV + hv
    rec = rec_ptr + tile * (C * (3 * BK + BV + C))
    kind = rec_ptr.dtype.element_ty
    out = i[:, None] * BK + d[None, :]
    square = i[:, None] * C + i[None, :]
    keep = i[:, None] >= i[None, :]
    below = i[:, None] > i[None, :]
    unit = tl.exp2(-anchor)
    cross = C * (3 * BK + BV)

    in0 = i < rows
    t0 = start + i
    gl0, sum0 = _gate(g_ptr, a_exp, bias, lower_bound, t0, in0, hv, HV, d, K, GATE, ASM)
    if C > BC:
        in1 = i + BC < rows
        t1 = t0 + BC
        gl1, sum1 = _gate(g_ptr, a_exp, bias, lower_bound, t1, in1, hv, HV, d, K, GATE, ASM)
        tl.store(decay_ptr + tile * BK + d, tl.exp2(sum0 + sum1))
    else:
        tl.store(decay_ptr + tile * BK + d, tl.exp2(sum0))

    b0 = load_beta(beta_ptr, t0, in0, hv, HV, BETA_SIGMOID, BETA_FACTOR)
    k0 = load_rows(k_ptr, t0, in0, h, H, d, K, L2NORM)
    q0 = load_rows(q_ptr, t0, in0, h, H, d, K, L2NORM) * scale
    up = exp2(gl0 + anchor, ASM)
    q0 *= up
    ka = k0 * up
    k0 *= exp2(-gl0 - anchor, ASM)
    ks = tl.trans(operand(k0, DOT))
    tl.store(rec + cross + square, tl.where(keep, mma(operand(q0, DOT), ks, DOT), 0.0).to(kind))
    low0 = tl.where(below, mma(operand(ka, DOT), ks, DOT), 0.0) * b0[:, None]
    tl.store(rec + out, (q0 * unit).to(kind))
    kw0 = operand(ka * (b0 * unit)[:, None], DOT)
    k0 *= exp2(sum0 + anchor, ASM)[None, :]
    if C > BC:
        kr = tl.trans(operand(k0, DOT))
        k0 *= exp2(sum1, ASM)[None, :]
    tl.store(rec + C * BK + out, k0.to(kind))
    x0 = unit_lower_inverse(low0, i, INV_DOT, BC)

    if C > BC:
        b1 = load_beta(beta_ptr, t1, in1, hv, HV, BETA_SIGMOID, BETA_FACTOR)
        k1 = load_rows(k_ptr, t1, in1, h, H, d, K, L2NORM)
        q1 = load_rows(q_ptr, t1, in1, h, H, d, K, L2NORM) * scale
        up = exp2(gl1 + anchor, ASM)
        q1 *= up
        ka = k1 * up
        k1 *= exp2(-gl1 - anchor, ASM)
        ks = tl.trans(operand(k1, DOT))
        qs = operand(q1, DOT)
        kas = operand(ka, DOT)
        tl.store(rec + cross + BC * C + BC + square, tl.where(keep, mma(qs, ks, DOT), 0.0).to(kind))
        tl.store(rec + cross + BC + square, tl.zeros([BC, BC], kind))
        tl.store(rec + cross + BC * C + square, (mma(qs, kr, DOT) * unit).to(kind))
        low1 = tl.where(below, mma(kas, ks, DOT), 0.0) * b1[:, None]
        low10 = mma(kas, kr, DOT) * (b1 * unit)[:, None]
        since = exp2(sum0 - anchor, ASM)[None, :]
        tl.store(rec + BC * BK + out, (q1 * since).to(kind))
        kw1 = operand(ka * since * b1[:, None], DOT)
        k1 *= exp2(sum1 + anchor, ASM)[None, :]
        tl.store(rec + (C + BC) * BK + out, k1.to(kind))
        x1 = unit_lower_inverse(low1, i, INV_DOT, BC)
        x10 = operand(merge_inverse(x1, low10, x0, INV_DOT), DOT)
        x1 = operand(x1, DOT)
        x0 = operand(x0, DOT)
        tl.store(rec + (2 * C + BC) * BK + out, mma_acc(x1, kw1, mma(x10, kw0, DOT), DOT).to(kind))
    else:
        x0 = operand(x0, DOT)
    tl.store(rec + 2 * C * BK + out, mma(x0, kw0, DOT).to(kind))

    for first in tl.range(0, BV, BU):
        c = first + tl.arange(0, BU)
        ucell = c[None, :] * C + i[:, None]
        v_at = hv * V + c[None, :]
        v0 = tl.load(v_ptr + t0[:, None] * (HV * V) + v_at, mask=in0[:, None] & (c < V)[None, :], other=0.0)
        v0 = operand(v0.to(tl.float32) * b0[:, None], DOT)
        tl.store(rec + 3 * C * BK + ucell, mma(x0, v0, DOT).to(kind))
        if C > BC:
            v1 = tl.load(
                v_ptr + t1[:, None] * (HV * V) + v_at, mask=in1[:, None] & (c < V)[None, :], other=0.0
            )
            v1 = operand(v1.to(tl.float32) * b1[:, None], DOT)
            tl.store(rec + 3 * C * BK + BC + ucell, mma_acc(x1, v1, mma(x10, v0, DOT), DOT).to(kind))
