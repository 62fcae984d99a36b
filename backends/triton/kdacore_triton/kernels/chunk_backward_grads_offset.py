"""Launch 3 of 3 of the chunk backward with one constant exponent offset per half chunk: every input gradient.

The equations are those of chunk_backward_grads; the operands are the tiles of
chunk_backward_prepare_offset_c32. Grid: one program per chunk and value head. The halves follow one
another as tiles ``[channels, S tokens]``. Per half, with ``up`` = 2^(P + centre), ``down`` =
2^(-P - centre) and ``out`` = 2^(decay to the half's end)::

    dq = up aq       aq = (do S^T) (decay before the half)        + sum_j dAqk_ij yk_j + across: sum_j dAqk_ij sk_j
    x  = up ax       ax = -(dr S^T) (decay before the half)       + sum_j dL_ij yk_j   + across: sum_j dL_ij sk_j
    dk = beta x + down cy + out cs,
                     cy = sum_i (dAqk_ij zq_i + dL_ij zb_i)
                     cs = (v' dS^T) (decay after the half)        + across: the same sum
    q dq = zq aq     beta k x = zb ax     dgc = zq aq + zb ax - yk cy - sk cs

``dgc`` needs nothing but the operands, so terms that cancel exactly also cancel in bfloat16 and tf32.
That is why beta is part of zb: dL and beta dL would be rounded differently. The sums over the other
half that dg needs are taken before the pairs of the half itself are added.

With fast decays the largest terms are those that no decay multiplies: a token's pair with itself, and
what the half's last token adds to the state after it. Products of operands wider than bfloat16
(WIDE_OPERANDS) are precise enough to leave both out of ``dgc``: each step then sums only the terms
that its decay multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_gate import (
    gate_grad_as,
    gate_grads,
    gate_tile,
    steps,
    store_beta_grad,
    sum_bias,
)
from .chunk_backward_io import ROW_BETA, ROW_RK, ROW_RQ, load_rows, store_rows, store_zero_grads
from .chunk_backward_sums import split_bf16, sum_tokens, sum_tokens_exact
from .common import chunk_of_program, exp2, mma, mma_acc, product
from .gate_and_beta import load_gate_rate
from .groups import Gradients, Inputs, OffsetOperands, Place, ScannedTiles
from .prefetch import prefetch_rows, prefetch_tile


@triton.jit
def operand_half(x, side, KP: tl.constexpr, S: tl.constexpr):
    """One half of a ``[C, KP]`` tile as an operand ``[KP, S]``."""
    t = side * S + tl.arange(0, S)
    return tl.trans(tl.load(x + t[:, None] * KP + tl.arange(0, KP)[None, :]))


@triton.jit
def value_half(v, do, dv, vT, drT, b, at, vs, side, S: tl.constexpr):
    """Stores dv of one half. Returns do ``[S, vs]``, v' ``[vs, S]``, dr ``[S, vs]`` and the part of dbeta from v."""
    tall = side * S + vs[:, None] * (2 * S) + tl.arange(0, S)[None, :]
    start = at.start + side * S
    rows = at.rows - side * S
    stride = at.HV * at.V
    first = at.hv * at.V
    dr = tl.trans(tl.load(drT + tall))
    d = dr.to(tl.float32)
    store_rows(dv, b[:, None] * d, start, rows, stride, first, vs, at.V, S)
    db = tl.sum(product(d, load_rows(v, start, rows, stride, first, vs, at.V, S).to(tl.float32)), 1)
    dot = load_rows(do, start, rows, stride, first, vs, at.V, S).to(vT.dtype.element_ty)
    return dot, tl.load(vT + tall), dr, db


@triton.jit
def state_grads(
    hT, do, drT, aq, ax, at, side,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds ``(do S^T)^T`` and ``(dr S^T)^T`` of one half to aq and ax, ``[KP, S]``."""
    cols = tl.arange(0, KP)
    for first in range(0, VP, BV):
        vs = first + tl.arange(0, BV)
        dr = tl.load(drT + side * S + vs[:, None] * (2 * S) + tl.arange(0, S)[None, :])
        ht = tl.trans(tl.load(hT + vs[:, None] * KP + cols[None, :]))
        ax = mma_acc(ht, dr, ax, DOT)
        dot = load_rows(do, at.start + side * S, at.rows - side * S, at.HV * at.V, at.hv * at.V, vs, at.V, S)
        aq = mma_acc(ht, tl.trans(dot.to(hT.dtype.element_ty)), aq, DOT)
    return aq, ax


@triton.jit
def l2norm_grad(d, x, norms, start, rows, row_stride, first, cols, width, S: tl.constexpr):
    """Gradients of the rows of x from those, ``[S, cols]``, of ``x / |x|``.

    Loads x as it was given: where a gradient is nearly parallel to x, the subtraction needs more bits than operands
    have.
    """
    rn = tl.load(norms)[:, None]
    xn = load_rows(x, start, rows, row_stride, first, cols, width, S).to(tl.float32) * rn
    return rn * (d - xn * tl.sum(product(d, xn), 1)[:, None])


@triton.jit
def half_grads(
    aq, ax, cs, zq_op, zb_op, yk, sk_op, A, own, L, later_sum, db,
    inputs, grads, row_values, a_exp, lower_bound, floor, centre, grow, at, side,
    KP: tl.constexpr, S: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr,
    DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of one half, stores its dq, dk, dg; returns dbeta's sum and the sums for dt_bias and A_log.

    ``own``: the diagonal of dAqk, where A does not hold it (WIDE_OPERANDS).
    """
    WIDE_OPERANDS: tl.constexpr = DOT != "bf16"
    t = tl.arange(0, S)
    cols = tl.arange(0, KP)
    H, h, HV, hv, K = at.H, at.h, at.HV, at.hv, at.K
    start = at.start + side * S
    rows = at.rows - side * S
    half = Place(start, rows, H, h, HV, hv, K, at.V)
    row_values += side * S + t
    b = tl.load(row_values + ROW_BETA * (2 * S))[None, :]

    x = gate_tile(inputs.g, inputs.dt_bias, half, cols, S)
    inside = (cols < K)[:, None] & (t < rows)[None, :]
    step = steps(x, a_exp, lower_bound, inside, GATE, ASM)
    differentiable = inside & (step >= floor)
    hi, lo = split_bf16(tl.maximum(step, floor), DOT)
    P = sum_tokens(hi, lo, t[:, None] <= t[None, :], DOT) + centre
    up = exp2(P, ASM)
    down = exp2(-P, ASM)

    yk_op = operand_half(yk, side, KP, S)
    aq = mma_acc(yk_op, tl.trans(A), aq, DOT)
    z = zq_op.to(tl.float32)
    dgc = z * aq
    dqt = up * aq
    kn = yk_op.to(tl.float32) * up
    if WIDE_OPERANDS:
        qn = z * down
        dqt += own[None, :] * kn
    d = tl.trans(grow * dqt)
    if L2NORM:
        d = l2norm_grad(d, inputs.q, row_values + ROW_RQ * (2 * S), start, rows, H * K, h * K, cols, K, S)
    store_rows(grads.dq, d, start, rows, HV * K, hv * K, cols, K, S)

    ax = mma_acc(yk_op, tl.trans(L), ax, DOT)
    dgc += zb_op.to(tl.float32) * ax
    dkt = up * ax
    db += grow * tl.sum(product(kn, dkt), 0)
    dkt *= b

    cy = mma_acc(zb_op, L, mma(zq_op, A, DOT), DOT)
    dgc -= yk_op.to(tl.float32) * cy
    dkt += down * cy

    e = sk_op.to(tl.float32) * cs
    if WIDE_OPERANDS:
        passing = sum_tokens_exact(e, t[:, None] < t[None, :], DOT)
    else:
        dgc -= e
    dkt += exp2(sum_tokens(hi, lo, t[:, None] > t[None, :], DOT), ASM) * cs
    if WIDE_OPERANDS:
        dkt += own[None, :] * qn
    d = tl.trans(grow * dkt)
    if L2NORM:
        d = l2norm_grad(d, inputs.k, row_values + ROW_RK * (2 * S), start, rows, H * K, h * K, cols, K, S)
    store_rows(grads.dk, d, start, rows, HV * K, hv * K, cols, K, S)

    dstep = sum_tokens_exact(dgc, t[:, None] >= t[None, :], DOT) + later_sum[:, None]
    if WIDE_OPERANDS:
        dstep += passing
    dstep *= grow
    kind: tl.constexpr = grads.dg.dtype.element_ty
    dx, da = gate_grads(dstep, x, step, a_exp, lower_bound, differentiable, GATE, ASM, kind)
    dx_stored = tl.trans(gate_grad_as(dx, GATE, kind))
    store_rows(grads.dg, dx_stored, start, rows, HV * K, hv * K, cols, K, S)
    return db, sum_bias(dx, 1, GATE), tl.sum(da, 1)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_backward_grads_offset_kernel(
    inputs: Inputs, do, operands: OffsetOperands, row_values, scanned: ScannedTiles, grads: Gradients,
    scale, lower_bound, floor, centre, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, S: tl.constexpr,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``, with one slot more than chunks need when packed.

    ``dq`` and ``dk`` have HV heads. L2NORM: they are gradients of q and k before the l2norm.
    """
    C: tl.constexpr = 2 * S
    WIDE_OPERANDS: tl.constexpr = DOT != "bf16"
    pid, hv, start, rows = chunk_of_program(inputs.cu_seqlens, N, T, NT, HV, C, PACKED)
    if rows <= 0:
        if PACKED:
            store_zero_grads(grads, inputs.cu_seqlens, N, pid // HV, T, HV, hv, K, V, KP, VP, False, C)
        return
    h = hv // (HV // H)
    chunk = pid.to(tl.int64)
    at = Place(start, rows, H, h, HV, hv, K, V)
    vT = scanned.vT + chunk * (VP * C)
    drT = scanned.drT + chunk * (VP * C)
    hT = scanned.hT + chunk * (VP * KP)
    dhT = scanned.dhT + chunk * (VP * KP)
    zq = operands.zq + chunk * (C * KP)
    zb = operands.zb + chunk * (C * KP)
    yk = operands.yk + chunk * (C * KP)
    sk = operands.sk + chunk * (C * KP)
    row_values += chunk * ROWS
    if ASM:
        prefetch_rows(do, start, rows, HV * V, hv * V, V, VP, C)
        prefetch_tile(vT, VP * C)
        prefetch_tile(drT, VP * C)
        prefetch_rows(inputs.v, start, rows, HV * V, hv * V, V, VP, C)
        prefetch_tile(hT, VP * KP)
        prefetch_tile(dhT, VP * KP)
        prefetch_tile(sk, C * KP)
        prefetch_tile(zq, C * KP)
        prefetch_tile(zb, C * KP)
        prefetch_rows(inputs.g, start, rows, HV * K, hv * K, K, KP, C)
        prefetch_tile(yk, C * KP)
        if L2NORM:
            prefetch_rows(inputs.q, start, rows, H * K, h * K, K, KP, C)
            prefetch_rows(inputs.k, start, rows, H * K, h * K, K, KP, C)
    kind = hT.dtype.element_ty
    t = tl.arange(0, S)
    i = t[:, None]
    j = t[None, :]
    cols = tl.arange(0, KP)

    b0 = tl.load(row_values + ROW_BETA * C + t)
    b1 = tl.load(row_values + ROW_BETA * C + S + t)
    db0 = tl.zeros([S], tl.float32)
    db1 = tl.zeros([S], tl.float32)
    A0 = tl.zeros([S, S], tl.float32)
    A1 = tl.zeros([S, S], tl.float32)
    Ax = tl.zeros([S, S], tl.float32)
    L0 = tl.zeros([S, S], tl.float32)
    L1 = tl.zeros([S, S], tl.float32)
    Lx = tl.zeros([S, S], tl.float32)
    for first in range(0, VP, BV):
        vs = first + tl.arange(0, BV)
        do0, v0, dr0, d0 = value_half(inputs.v, do, grads.dv, vT, drT, b0, at, vs, 0, S)
        do1, v1, dr1, d1 = value_half(inputs.v, do, grads.dv, vT, drT, b1, at, vs, 1, S)
        db0 += d0
        db1 += d1
        A0 = mma_acc(do0, v0, A0, DOT)
        L0 = mma_acc(dr0, v0, L0, DOT)
        Ax = mma_acc(do1, v0, Ax, DOT)
        Lx = mma_acc(dr1, v0, Lx, DOT)
        A1 = mma_acc(do1, v1, A1, DOT)
        L1 = mma_acc(dr1, v1, L1, DOT)
    # Mask products with later rows: they must not influence even the scale below.
    A0 = tl.where(i >= j, A0, 0.0)
    A1 = tl.where(i >= j, A1, 0.0)
    L0 = tl.where(i > j, L0, 0.0)
    L1 = tl.where(i > j, L1, 0.0)
    # Multiplied by factors of 2^(+-centre), large or small gradients would leave float32's range. Scale by a power of
    # two that brings the largest product to about 1.
    largest = tl.maximum(tl.maximum(tl.abs(A0), tl.abs(L0)), tl.maximum(tl.abs(A1), tl.abs(L1)))
    largest = tl.max(tl.max(tl.maximum(largest, tl.maximum(tl.abs(Ax), tl.abs(Lx))), 1), 0)
    shift = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    shift = tl.minimum(tl.maximum(shift, -100), 100)
    shrink = ((127 - shift) << 23).to(tl.float32, bitcast=True)
    grow = ((127 + shift) << 23).to(tl.float32, bitcast=True)
    unit = tl.exp2(-centre)
    scale *= shrink
    own0 = tl.zeros([S], tl.float32)
    own1 = tl.zeros([S], tl.float32)
    if WIDE_OPERANDS:
        own0 = scale * tl.sum(tl.where(i == j, A0, 0.0), 1)
        own1 = scale * tl.sum(tl.where(i == j, A1, 0.0), 1)
        A0 = tl.where(i > j, A0, 0.0)
        A1 = tl.where(i > j, A1, 0.0)
    A0 = (scale * A0).to(kind)
    A1 = (scale * A1).to(kind)
    Ax = (scale * unit * Ax).to(kind)
    L0 = (-shrink * L0).to(kind)
    L1 = (-shrink * L1).to(kind)
    Lx = (-(unit * shrink) * Lx).to(kind)

    a_exp = load_gate_rate(inputs.A_log, hv)
    last = operands.last + chunk * (3 * KP) + cols
    before = tl.load(last + KP) * unit
    after = tl.load(last + 2 * KP) * shrink

    # Column sums: gradients of k from the state at the chunk's end.
    cs0 = tl.zeros([KP, S], tl.float32)
    cs1 = tl.zeros([KP, S], tl.float32)
    later_sum = tl.zeros([KP], tl.float32)
    for first in range(0, VP, BV):
        vs = first + tl.arange(0, BV)
        ht = tl.load(hT + vs[:, None] * KP + cols[None, :])
        dht = tl.load(dhT + vs[:, None] * KP + cols[None, :])
        later_sum += tl.sum(product(ht.to(tl.float32), dht.to(tl.float32)), 0)
        dht = tl.trans(dht)
        tall = vs[:, None] * C + j
        cs0 = mma_acc(dht, tl.load(vT + tall), cs0, DOT)
        cs1 = mma_acc(dht, tl.load(vT + tall + S), cs1, DOT)
    sk0 = operand_half(sk, 0, KP, S)
    sk1 = operand_half(sk, 1, KP, S)
    cs0 *= after[:, None]
    cs1 *= shrink
    later_sum *= tl.load(last) * shrink
    from_first = tl.sum(product(sk0.to(tl.float32), cs0), 1)

    zq1 = operand_half(zq, 1, KP, S)
    zb1 = operand_half(zb, 1, KP, S)
    aq = tl.zeros([KP, S], tl.float32)
    ax = tl.zeros([KP, S], tl.float32)
    aq, ax = state_grads(hT, do, drT, aq, ax, at, 1, KP, VP, BV, S, DOT)
    aq *= (scale * before)[:, None]
    ax *= (-shrink * before)[:, None]
    later0 = later_sum
    if WIDE_OPERANDS:
        later0 += tl.sum(zq1.to(tl.float32) * aq + zb1.to(tl.float32) * ax, 1)
    aq = mma_acc(sk0, tl.trans(Ax), aq, DOT)
    ax = mma_acc(sk0, tl.trans(Lx), ax, DOT)
    later1 = later_sum + from_first
    if not WIDE_OPERANDS:
        later0 = later1 + tl.sum(zq1.to(tl.float32) * aq + zb1.to(tl.float32) * ax, 1)
        later1 += tl.sum(product(sk1.to(tl.float32), cs1), 1)
    cs0 = mma_acc(zb1, Lx, mma_acc(zq1, Ax, cs0, DOT), DOT)
    db1, dbias1, da1 = half_grads(
        aq, ax, cs1, zq1, zb1, yk, sk1, A1, own1, L1, later1, db1,
        inputs, grads, row_values, a_exp, lower_bound, floor, centre, grow, at, 1,
        KP, S, GATE, L2NORM, DOT, ASM,
    )  # fmt: skip

    zq0 = operand_half(zq, 0, KP, S)
    zb0 = operand_half(zb, 0, KP, S)
    aq = tl.zeros([KP, S], tl.float32)
    ax = tl.zeros([KP, S], tl.float32)
    aq, ax = state_grads(hT, do, drT, aq, ax, at, 0, KP, VP, BV, S, DOT)
    db0, dbias0, da0 = half_grads(
        aq * (scale * unit), ax * -(shrink * unit), cs0, zq0, zb0, yk, sk0, A0, own0, L0, later0, db0,
        inputs, grads, row_values, a_exp, lower_bound, floor, centre, grow, at, 0,
        KP, S, GATE, L2NORM, DOT, ASM,
    )  # fmt: skip

    if inputs.dt_bias is not None:
        tl.store(grads.dbias_part + chunk * KP + cols, dbias0 + dbias1)
    if inputs.A_log is not None:
        tl.store(grads.dA_part + pid, tl.sum(da0 + da1, 0))
    store_beta_grad(grads.dbeta, inputs.beta, db0, at, 0, S, BETA)
    store_beta_grad(grads.dbeta, inputs.beta, db1, at, S, S, BETA)
