"""Launch 1 of 3 of the chunk backward with one constant exponent offset per half chunk; chunks of 32 rows.

Every step's log2 decay is at least ``floor``, and a half has so few rows S that ``S * floor`` fits
float32's range twice over. Let P be the steps summed from the half's first row up to and including
a row, and ``centre = -floor * S / 2`` a constant. Then both factors

    2^(P + centre),   2^(-P - centre)

stay within ``2^(+-centre)``, and their product over a pair ``i >= j`` of one half is the pair's decay.
Pairs across the halves are decayed to and from the boundary between the halves, where no exponent is
positive. ``centre`` depends on no row, so no later row changes a bit of an earlier one. Gates without
a lower bound are clamped at ``floor`` (see chunk_backward_plan).

Here S = 16 and both halves are one tile; chunk_backward_prepare_offset_c64 has S = 32. Grid: one
program per chunk and value head. Tiles are chunk-major; later launches read them whole, without masks::

    Aqk  [C, C]   scale * q_i . (k_j 2^(gc_i - gc_j)), j <= i
    inv  [C, C]   (I + tril(beta_i k_i . (k_j 2^(gc_i - gc_j)), -1))^-1
    qg   [C, KP]  scale * q 2^gc            kg [C, KP]  k 2^(gc_last - gc)
    w    [C, KP]  inv @ (beta k 2^gc)       uT [VP, C]  (inv @ (beta v))^T
    zq   [C, KP]  q 2^(P + centre)          zb [C, KP]  beta k 2^(P + centre)
    yk   [C, KP]  k 2^(-P - centre)         sk [C, KP]  k 2^(decay to the half's last row)
    last [3, KP]  2^gc_last, and the decay over each half
    row_values    beta and the reciprocal norms of q and k, C each
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_gate import activated_beta, gate_input, steps
from .chunk_backward_io import ROW_BETA, ROW_RK, ROW_RQ, load_rows, load_vector
from .chunk_backward_sums import split_bf16, sum_rows, tf32_rounded
from .common import chunk_of_slot, exp2, mma
from .gate_and_beta import load_gate_rate
from .groups import Inputs, OffsetOperands, Place, PreparedTiles
from .prefetch import prefetch_rows
from .triangular_inverse import unit_lower_inverse_masked

S = tl.constexpr(16)
C = tl.constexpr(32)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_backward_prepare_offset_c32_kernel(
    inputs: Inputs, tiles: PreparedTiles, operands: OffsetOperands, row_values,
    scale, lower_bound, floor, centre, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``. ``centre`` is an integer."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid - slot * HV
    start, rows = chunk_of_slot(inputs.cu_seqlens, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    at = Place(start, rows, H, h, HV, hv, K, V)
    chunk = pid.to(tl.int64)
    if ASM:
        prefetch_rows(inputs.q, start, rows, H * K, h * K, K, KP, C)
        prefetch_rows(inputs.k, start, rows, H * K, h * K, K, KP, C)
        prefetch_rows(inputs.g, start, rows, HV * K, hv * K, K, KP, C)
        prefetch_rows(inputs.v, start, rows, HV * V, hv * V, V, VP, C)
    r = tl.arange(0, C)
    i = r[:, None]
    j = r[None, :]
    second = i >= S
    same_half = (i >= S) == (j >= S)
    wide = chunk * (C * KP) + i * KP

    b = activated_beta(load_vector(inputs.beta, start, rows, HV, hv, C), rows, C, BETA)
    row_values += chunk * ROWS
    tl.store(row_values + ROW_BETA * C + r, b)
    a_exp = load_gate_rate(inputs.A_log, hv)
    rq = tl.full([C], 1.0, tl.float32)
    rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        sq = tl.zeros([C], tl.float32)
        square_k = tl.zeros([C], tl.float32)
        for first in range(0, KP, BK):
            cols = first + tl.arange(0, BK)
            qt = load_rows(inputs.q, start, rows, H * K, h * K, cols, K, C).to(tl.float32)
            kt = load_rows(inputs.k, start, rows, H * K, h * K, cols, K, C).to(tl.float32)
            sq += tl.sum(qt * qt, 1)
            square_k += tl.sum(kt * kt, 1)
        rq = 1.0 / tl.sqrt(sq + 1e-6)
        rk = 1.0 / tl.sqrt(square_k + 1e-6)
        tl.store(row_values + ROW_RQ * C + r, rq)
        tl.store(row_values + ROW_RK * C + r, rk)

    unit = tl.exp2(-centre)
    Aq = tl.zeros([C, C], tl.float32)
    Ak = tl.zeros([C, C], tl.float32)
    for first in range(0, KP, BK):
        cols = first + tl.arange(0, BK)
        x = gate_input(inputs.g, inputs.dt_bias, at, cols, C)
        inside = (i < rows) & (cols < K)[None, :]
        step = tl.maximum(steps(x, a_exp, lower_bound, inside, GATE, ASM), floor)
        d0 = tl.exp2(tl.sum(tl.where(second, 0.0, step), 0))
        d1 = tl.exp2(tl.sum(tl.where(second, step, 0.0), 0))
        column = chunk * (3 * KP) + cols
        tl.store(operands.last + column, d0 * d1)
        tl.store(operands.last + column + KP, d0)
        tl.store(operands.last + column + 2 * KP, d1)
        hi, lo = split_bf16(step, DOT)
        P = sum_rows(same_half & (j <= i), hi, lo, DOT) + centre
        kt = load_rows(inputs.k, start, rows, H * K, h * K, cols, K, C).to(tl.float32) * rk[:, None]
        kind = operands.zb.dtype.element_ty
        out = wide + cols[None, :]
        y = tf32_rounded(kt * exp2(-P, ASM), DOT).to(kind)
        tl.store(operands.yk + out, y)
        s = kt * exp2(sum_rows(same_half & (j > i), hi, lo, DOT), ASM)
        tl.store(tiles.kg + out, (s * tl.where(second, 1.0, d1[None, :])).to(kind))
        s = tf32_rounded(s, DOT).to(kind)
        tl.store(operands.sk + out, s)
        f = exp2(P, ASM)
        kt *= f * b[:, None]
        z = tf32_rounded(kt, DOT).to(kind)
        tl.store(operands.zb + out, z)
        before = tl.where(second, d0[None, :], 1.0) * unit
        # beta k 2^gc waits in w's place until the inverse is there.
        tl.store(tiles.w + out, (kt * before).to(kind))
        yT = tl.trans(y)
        sT = tl.trans(s)
        Ak += tl.where(same_half, mma(z, yT, DOT), unit * mma(z, sT, DOT))
        qt = load_rows(inputs.q, start, rows, H * K, h * K, cols, K, C).to(tl.float32) * rq[:, None]
        z = tf32_rounded(qt * f, DOT).to(kind)
        tl.store(operands.zq + out, z)
        tl.store(tiles.qg + out, (qt * f * before * scale).to(kind))
        Aq += tl.where(same_half, mma(z, yT, DOT), unit * mma(z, sT, DOT))

    square = chunk * (C * C) + i * C + j
    tl.store(tiles.Aqk + square, tl.where(i >= j, scale * Aq, 0.0).to(tiles.Aqk.dtype.element_ty))
    M = unit_lower_inverse_masked(tl.where(i > j, Ak, 0.0), 5, C, INV_DOT).to(tiles.inv.dtype.element_ty)
    tl.store(tiles.inv + square, M)

    tl.debug_barrier()
    for first in range(0, KP, BK):
        out = wide + first + tl.arange(0, BK)[None, :]
        tl.store(tiles.w + out, mma(M, tl.load(tiles.w + out), DOT).to(tiles.w.dtype.element_ty))
    MT = tl.trans(M)
    for first in range(0, VP, BV):
        cols = first + tl.arange(0, BV)
        vt = load_rows(inputs.v, start, rows, HV * V, hv * V, cols, V, C).to(tl.float32) * b[:, None]
        ut = mma(tl.trans(vt.to(tiles.uT.dtype.element_ty)), MT, DOT)
        tl.store(tiles.uT + chunk * (VP * C) + cols[:, None] * C + j, ut.to(tiles.uT.dtype.element_ty))
