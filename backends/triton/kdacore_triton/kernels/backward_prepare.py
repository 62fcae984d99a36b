"""First launch of the chunk backward: everything of one chunk that needs no state.

One program a chunk and value head. Writes, in chunk-major tiles that later kernels read whole and unmasked::

    Aqk  [C, C]   scale * q_i . (k_j 2^(gc_i - gc_j)), j <= i
    inv  [C, C]   (I + tril(beta_i k_i . (k_j 2^(gc_i - gc_j)), -1))^-1
    qg   [C, KP]  scale * q 2^gc            kg [C, KP]  k 2^(gc_last - gc)
    w    [C, KP]  inv @ (beta k 2^gc)       uT [VP, C]  (inv @ (beta v))^T
    last [KP]     2^gc_last                 row_values  beta and the reciprocal norms of q and k, C each
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward_blocks import (
    BLOCK,
    BLOCK_LEVEL,
    LEVELS,
    C,
    activated_beta,
    block_pairs,
    block_prefix,
    boundary_factor,
    gate_input,
    gate_input_scalar,
    gate_rate,
    level_pairs,
    load_rows,
    load_vector,
    steps,
    sum_rows,
    up_to_row,
)
from .backward_halves import ROW_BETA, ROW_RK, ROW_RQ, halves
from .common import LOG2E, chunk_of_slot, exp2, mma, mma_acc, operand


@triton.jit
def unit_lower_inverse(A, DOT: tl.constexpr):
    """``(I + A)^-1`` of a strictly lower triangular ``[C, C]`` tile, halves merged from 1 row up to 32."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    inv = tl.where(i == j, 1.0, 0.0) - tl.where(level_pairs(0), A, 0.0)
    for level in range(1, LEVELS):
        below = mma(tl.where(level_pairs(level), A, 0.0), inv, DOT)
        inv -= mma(inv, below, DOT)
    return inv


@triton.jit
def channel_products(
    qt, kt, hi, lo, Aq, Ak, lower_bound, BOUNDED: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Adds ``sum_d q_id k_jd 2^(gc_id - gc_jd)`` to Aq and the same of k, k to Ak, for all pairs ``i > j``."""
    first = BLOCK_LEVEL if BOUNDED else 0
    for level in range(first, LEVELS):
        f = boundary_factor(hi, lo, level, DOT, ASM)
        kf = operand(kt * f, DOT)
        kT = tl.trans(kf)
        pairs = level_pairs(level)
        Aq += tl.where(pairs, mma(operand(qt * f, DOT), kT, DOT), 0.0)
        Ak += tl.where(pairs, mma(kf, kT, DOT), 0.0)
    if BOUNDED:
        # One anchor a block: at most 16 steps of lower_bound apart, centred so that both factors fit float32.
        e = sum_rows(block_prefix(), hi, lo, DOT) - lower_bound * LOG2E * (BLOCK // 2)
        kT = tl.trans(operand(kt * exp2(-e, ASM), DOT))
        f = exp2(e, ASM)
        pairs = block_pairs()
        Aq += tl.where(pairs, mma(operand(qt * f, DOT), kT, DOT), 0.0)
        Ak += tl.where(pairs, mma(operand(kt * f, DOT), kT, DOT), 0.0)
    return Aq, Ak


@triton.jit
def prepare_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
    Aqk, inv, qg, kg, w, uT, last, row_values,
    scale, lower_bound, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, SCALAR: tl.constexpr,
    BOUNDED: tl.constexpr, L2NORM: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid - slot * HV
    start, rows = chunk_of_slot(cu_seqlens, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    tile = pid.to(tl.int64) * C
    r = tl.arange(0, C)
    qk_stride = H * K
    i = r[:, None]
    j = r[None, :]

    b = activated_beta(load_vector(beta, start, rows, HV, hv), rows, BETA)
    row_values += pid.to(tl.int64) * ROWS
    tl.store(row_values + ROW_BETA * C + r, b)
    a_exp = gate_rate(A_log, hv, HAS_A)
    rq = tl.full([C], 1.0, tl.float32)
    rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        sq = tl.zeros([C], tl.float32)
        sk = tl.zeros([C], tl.float32)
        for first in range(0, KP, BK):
            cols = first + tl.arange(0, BK)
            qt = load_rows(q, start, rows, qk_stride, h * K, cols, K)
            kt = load_rows(k, start, rows, qk_stride, h * K, cols, K)
            sq += tl.sum(qt * qt, 1)
            sk += tl.sum(kt * kt, 1)
        rq = 1.0 / tl.sqrt(sq + 1e-6)
        rk = 1.0 / tl.sqrt(sk + 1e-6)
        tl.store(row_values + ROW_RQ * C + r, rq)
        tl.store(row_values + ROW_RK * C + r, rk)
    if SCALAR:
        x = gate_input_scalar(g, dt_bias, start, rows, HV, hv, HAS_BIAS)
        gc = tl.cumsum(steps(x, a_exp, lower_bound, r < rows, GATE, ASM), 0)
        total = tl.min(gc, 0)
        tl.store(last + pid, tl.exp2(total))

    Aq = tl.zeros([C, C], tl.float32)
    Ak = tl.zeros([C, C], tl.float32)
    diagonal = tl.zeros([C], tl.float32)
    for first in range(0, KP, BK):
        cols = first + tl.arange(0, BK)
        qt = load_rows(q, start, rows, qk_stride, h * K, cols, K) * rq[:, None]
        kt = load_rows(k, start, rows, qk_stride, h * K, cols, K) * rk[:, None]
        diagonal += tl.sum(qt * kt, 1)
        if SCALAR:
            kT = tl.trans(kt)
            Aq = mma_acc(qt, kT, Aq, DOT)
            Ak = mma_acc(kt, kT, Ak, DOT)
            down = tl.exp2(gc)[:, None]
            rest = tl.exp2(total - gc)[:, None]
        else:
            x = gate_input(g, dt_bias, start, rows, HV, hv, cols, K, HAS_BIAS)
            inside = (r < rows)[:, None] & (cols < K)[None, :]
            step = steps(x, a_exp, lower_bound, inside, GATE, ASM)
            total = tl.sum(step, 0)
            tl.store(last + pid.to(tl.int64) * KP + cols, tl.exp2(total))
            hi, lo = halves(step, DOT)
            down = exp2(sum_rows(up_to_row(), hi, lo, DOT), ASM)
            rest = exp2(sum_rows(r[None, :] > r[:, None], hi, lo, DOT), ASM)
        at = (tile + r)[:, None] * KP + cols[None, :]
        tl.store(qg + at, (scale * (qt * down)).to(qg.dtype.element_ty))
        tl.store(kg + at, (kt * rest).to(kg.dtype.element_ty))
        # beta k 2^gc waits in w's place until the inverse is there.
        tl.store(w + at, (b[:, None] * kt * down).to(w.dtype.element_ty))
        if not SCALAR:
            Aq, Ak = channel_products(qt, kt, hi, lo, Aq, Ak, lower_bound, BOUNDED, DOT, ASM)

    if SCALAR:
        decay = tl.exp2(tl.minimum(gc[:, None] - gc[None, :], 0.0))
        Aq = tl.where(i > j, Aq * decay, 0.0)
        Ak = tl.where(i > j, Ak * decay, 0.0)
    Aq = scale * (Aq + tl.where(i == j, diagonal[:, None], 0.0))
    square = (tile + i) * C + j
    tl.store(Aqk + square, Aq.to(Aqk.dtype.element_ty))
    M = unit_lower_inverse(b[:, None] * Ak, INV_DOT).to(inv.dtype.element_ty)
    tl.store(inv + square, M)

    tl.debug_barrier()
    for first in range(0, KP, BK):
        at = (tile + r)[:, None] * KP + first + tl.arange(0, BK)[None, :]
        wt = mma(M, tl.load(w + at), DOT)
        tl.store(w + at, wt.to(w.dtype.element_ty))
    MT = tl.trans(M)
    for first in range(0, VP, BV):
        cols = first + tl.arange(0, BV)
        vt = load_rows(v, start, rows, HV * V, hv * V, cols, V) * b[:, None]
        ut = mma(tl.trans(vt.to(uT.dtype.element_ty)), MT, DOT)
        at = pid.to(tl.int64) * VP * C + cols[:, None] * C + j
        tl.store(uT + at, ut.to(uT.dtype.element_ty))
