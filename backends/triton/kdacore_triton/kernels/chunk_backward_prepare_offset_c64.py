"""backward_prepare_anchored for split_bf16 of 32 rows, each half a tile of its own.

Same results in the same places. Tiles of 32 rows keep registers few, so that many programs share a multiprocessor, and
their products go through the warp-level matrix instructions: with 64 rows the compiler picks warp-group ones, and ptxas
12.8 (Triton 3.6) loses their operands' addresses in this kernel's loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_gate import activated_beta, gate_input, gate_rate, steps
from .chunk_backward_io import (
    ROW_BETA,
    ROW_RK,
    ROW_RQ,
    load_rows,
    load_vector,
    reciprocal_norms,
    store_half_decays,
)
from .chunk_backward_sums import split_bf16, sum_rows, tf32_rounded
from .common import chunk_of_program, exp2, mma
from .prefetch import prefetch_inputs
from .triangular_inverse import unit_lower_inverse_masked

S = tl.constexpr(32)
C = tl.constexpr(64)


@triton.jit
def half_operands(
    q, k, zq, zb, yk, sk, qg, kg, w, step, b, rq, rk, before, after, scale, centre,
    start, rows, H, h, K, cols, out, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Stores the operand tiles of one half; returns zq, zb, yk, sk as rounded. ``before``, ``after``: the decays
    from the chunk's first row to the half, and from the half to the chunk's end."""
    i = tl.arange(0, S)[:, None]
    j = tl.arange(0, S)[None, :]
    kind = zb.dtype.element_ty
    hi, lo = split_bf16(step, DOT)
    P = sum_rows(j <= i, hi, lo, DOT) + centre
    up = exp2(P, ASM)
    before = before[None, :] * tl.exp2(-centre)
    kt = load_rows(k, start, rows, H * K, h * K, cols, K, S).to(tl.float32) * rk[:, None]
    y = tf32_rounded(kt * exp2(-P, ASM), DOT).to(kind)
    tl.store(yk + out, y)
    s = kt * exp2(sum_rows(j > i, hi, lo, DOT), ASM)
    tl.store(kg + out, (s * after[None, :]).to(kind))
    s = tf32_rounded(s, DOT).to(kind)
    tl.store(sk + out, s)
    kt *= up * b[:, None]
    # beta k 2^gc waits in w's place until the inverse is there.
    tl.store(w + out, (kt * before).to(kind))
    kt = tf32_rounded(kt, DOT).to(kind)
    tl.store(zb + out, kt)
    qt = load_rows(q, start, rows, H * K, h * K, cols, K, S).to(tl.float32) * rq[:, None] * up
    tl.store(qg + out, (qt * before * scale).to(kind))
    qt = tf32_rounded(qt, DOT).to(kind)
    tl.store(zq + out, qt)
    return qt, kt, y, s


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_backward_prepare_offset_c64_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
    Aqk, inv, qg, kg, w, uT, zq, zb, yk, sk, last, row_values,
    scale, lower_bound, floor, centre, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr,
    L2NORM: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``. ``centre`` is an integer."""
    pid, hv, start, rows = chunk_of_program(cu_seqlens, N, T, NT, HV, C, PACKED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    chunk = pid.to(tl.int64)
    if ASM:
        prefetch_inputs(q, k, g, v, start, rows, H, h, HV, hv, K, V, KP, VP, C)
    later = start + S
    beyond = rows - S
    r = tl.arange(0, S)
    i = r[:, None]
    j = r[None, :]
    kind = zb.dtype.element_ty

    b0 = activated_beta(load_vector(beta, start, rows, HV, hv, S), rows, S, BETA)
    b1 = activated_beta(load_vector(beta, later, beyond, HV, hv, S), beyond, S, BETA)
    row_values += chunk * ROWS + r
    tl.store(row_values + ROW_BETA * C, b0)
    tl.store(row_values + ROW_BETA * C + S, b1)
    a_exp = gate_rate(A_log, hv, HAS_A)
    rq0 = tl.full([S], 1.0, tl.float32)
    rq1 = tl.full([S], 1.0, tl.float32)
    rk0 = tl.full([S], 1.0, tl.float32)
    rk1 = tl.full([S], 1.0, tl.float32)
    if L2NORM:
        rq0, rk0 = reciprocal_norms(q, k, start, rows, H * K, h * K, K, KP, BK, S)
        rq1, rk1 = reciprocal_norms(q, k, later, beyond, H * K, h * K, K, KP, BK, S)
        tl.store(row_values + ROW_RQ * C, rq0)
        tl.store(row_values + ROW_RQ * C + S, rq1)
        tl.store(row_values + ROW_RK * C, rk0)
        tl.store(row_values + ROW_RK * C + S, rk1)

    A0 = tl.zeros([S, S], tl.float32)
    A1 = tl.zeros([S, S], tl.float32)
    Ax = tl.zeros([S, S], tl.float32)
    L0 = tl.zeros([S, S], tl.float32)
    L1 = tl.zeros([S, S], tl.float32)
    Lx = tl.zeros([S, S], tl.float32)
    one = tl.full([BK], 1.0, tl.float32)
    for first in range(0, KP, BK):
        cols = first + tl.arange(0, BK)
        known = (cols < K)[None, :]
        x = gate_input(g, dt_bias, start, rows, HV, hv, cols, K, S, HAS_BIAS)
        step0 = tl.maximum(steps(x, a_exp, lower_bound, (i < rows) & known, GATE, ASM), floor)
        x = gate_input(g, dt_bias, later, beyond, HV, hv, cols, K, S, HAS_BIAS)
        step1 = tl.maximum(steps(x, a_exp, lower_bound, (i < beyond) & known, GATE, ASM), floor)
        d0 = exp2(tl.sum(step0, 0), ASM)
        d1 = exp2(tl.sum(step1, 0), ASM)
        store_half_decays(last, chunk, cols, d0, d1, KP)

        out = chunk * (C * KP) + i * KP + cols[None, :]
        z_q, z_b, y, s = half_operands(
            q, k, zq, zb, yk, sk, qg, kg, w, step0, b0, rq0, rk0, one, d1, scale, centre,
            start, rows, H, h, K, cols, out, DOT, ASM,
        )  # fmt: skip
        y = tl.trans(y)
        A0 += mma(z_q, y, DOT)
        L0 += mma(z_b, y, DOT)
        s = tl.trans(s)
        z_q, z_b, y, _ = half_operands(
            q, k, zq, zb, yk, sk, qg, kg, w, step1, b1, rq1, rk1, d0, one, scale, centre,
            later, beyond, H, h, K, cols, out + S * KP, DOT, ASM,
        )  # fmt: skip
        Ax += mma(z_q, s, DOT)
        Lx += mma(z_b, s, DOT)
        y = tl.trans(y)
        A1 += mma(z_q, y, DOT)
        L1 += mma(z_b, y, DOT)

    unit = tl.exp2(-centre)
    square = chunk * (C * C) + i * C + j
    zero = tl.zeros([S, S], kind)
    tl.store(Aqk + square, tl.where(i >= j, scale * A0, 0.0).to(kind))
    tl.store(Aqk + square + S, zero)
    tl.store(Aqk + square + S * C, (scale * unit * Ax).to(kind))
    tl.store(Aqk + square + S * C + S, tl.where(i >= j, scale * A1, 0.0).to(kind))
    M0 = unit_lower_inverse_masked(tl.where(i > j, L0, 0.0), 5, S, INV_DOT)
    M1 = unit_lower_inverse_masked(tl.where(i > j, L1, 0.0), 5, S, INV_DOT)
    Mx = -mma(M1, mma(unit * Lx, M0, INV_DOT), INV_DOT)
    M0 = M0.to(kind)
    M1 = M1.to(kind)
    Mx = Mx.to(kind)
    tl.store(inv + square, M0)
    tl.store(inv + square + S, zero)
    tl.store(inv + square + S * C, Mx)
    tl.store(inv + square + S * C + S, M1)

    tl.debug_barrier()
    for first in range(0, KP, BK):
        out = w + chunk * (C * KP) + i * KP + first + tl.arange(0, BK)[None, :]
        kb0 = tl.load(out)
        kb1 = tl.load(out + S * KP)
        w0 = mma(M0, kb0, DOT)
        w1 = mma(Mx, kb0, DOT) + mma(M1, kb1, DOT)
        tl.debug_barrier()
        tl.store(out, w0.to(kind))
        tl.store(out + S * KP, w1.to(kind))
    M0 = tl.trans(M0)
    M1 = tl.trans(M1)
    Mx = tl.trans(Mx)
    for first in range(0, VP, BV):
        cols = first + tl.arange(0, BV)
        vb0 = load_rows(v, start, rows, HV * V, hv * V, cols, V, S).to(tl.float32) * b0[:, None]
        vb1 = load_rows(v, later, beyond, HV * V, hv * V, cols, V, S).to(tl.float32) * b1[:, None]
        vb0 = tl.trans(vb0.to(kind))
        vb1 = tl.trans(vb1.to(kind))
        out = uT + chunk * (VP * C) + cols[:, None] * C + j
        tl.store(out, mma(vb0, M0, DOT).to(kind))
        tl.store(out + S, (mma(vb0, Mx, DOT) + mma(vb1, M1, DOT)).to(kind))
