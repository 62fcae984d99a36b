"""Third launch of the chunk backward: every input gradient of one chunk, gate and norms included.

One program a chunk and value head. With ``S`` the state at the chunk's start, ``dS`` the gradient of the state at
its end, ``v'`` (v_new) and its gradient ``dv'`` from the scans, and ``d`` the product of decays from a row to the
boundary it names::

    dr   = inv^T dv'             dv = beta dr
    dAqk = scale tril(do v'^T)   dL = -tril(dr v'^T, -1)            (L = what inv is I plus of, inverted)
    dq   = scale 2^gc (do S^T)             + sum_j dAqk_ij k_j 2^(gc_i - gc_j)
    x    = -2^gc (dr S^T)                  + sum_j dL_ij   k_j 2^(gc_i - gc_j)
    dk   = beta x + 2^(gc_last - gc) (v' dS^T) + sum_i (dAqk_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
    dbeta = dr . v + k . x
    dgc  = q dq + k beta x - k (the other terms of dk), plus into the last row
           2^gc_last sum_v(S dS) + sum_i (k 2^(gc_last - gc) (v' dS^T))_i
    dg   = dgc summed from the row to the chunk's end, then through the gate

The pairs inside a chunk go level by level (backward_blocks). There one symmetric product serves rows and columns,
and dgc multiplies by the same rounded operands as the product, so that what cancels exactly cancels in bfloat16 too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backward_blocks import (
    LEVELS,
    C,
    activated_beta,
    boundary_factor,
    decays_after,
    gate_input,
    gate_input_scalar,
    gate_rate,
    halves,
    level_pairs,
    load_rows,
    load_vector,
    right_rows,
    rounded,
    steps,
    store_rows,
    store_vector,
    sum_rows,
    up_to_row,
)
from .common import LOG2E, chunk_of_slot, exp2, log2_decay_grad, mma, mma_acc, operand, sigmoid


@triton.jit
def channel_grads(
    qt, kt, b, gc, hi, lo, M1, M2, dq, dk, dgc, db,
    PRECISE: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds what the pairs ``i > j`` inside the chunk give to dq, dk, dgc and dbeta.

    ``M1``: strictly lower dAqk plus its transpose. ``M2``: dL plus the transpose of ``beta_i dL_ij``.
    """
    for level in range(LEVELS):
        f = boundary_factor(gc, hi, lo, level, PRECISE, DOT, ASM)
        right = right_rows(level)
        is_right = tl.where(right, 1.0, 0.0)
        pairs = level_pairs(level, True)
        z = rounded(tl.where(right, qt, kt) * f, DOT)
        p = mma(tl.where(pairs, M1, 0.0), z, DOT)
        e = z * p
        p *= f
        dq += is_right * p
        dk += (1.0 - is_right) * p
        dgc += (2.0 * is_right - 1.0) * e
        z = rounded(kt * f, DOT)
        p = mma(tl.where(pairs, M2, 0.0), z, DOT)
        e = z * p
        dk += tl.where(right, b[:, None], 1.0) * (f * p)
        dgc += tl.where(right, b[:, None], -1.0) * e
        db += tl.sum(is_right * e, 1)
    return dq, dk, dgc, db


@triton.jit
def gate_back(dstep, x, a_exp, lower_bound, inside, GATE: tl.constexpr, ASM: tl.constexpr):
    """Gradient of the raw gate, and what to add up for dA_log, from the gradient of the natural-log decay."""
    dx = tl.where(inside, dstep * log2_decay_grad(x, a_exp, lower_bound, GATE), 0.0)
    if GATE == 1:
        da = dstep * (steps(x, a_exp, lower_bound, inside, GATE, ASM) / LOG2E)
    else:
        da = dx * x
    return dx, da


@triton.jit
def beta_back(db, raw, BETA: tl.constexpr):
    """Gradient of beta as given, from the gradient of beta as used."""
    if BETA != 0:
        s = sigmoid(raw)
        db *= BETA * s * (1.0 - s)
    return db


@triton.jit
def norm_back(x, rn, d_raw, inner, start, rows, row_stride, first, cols, width):
    """Rewrites ``d_raw = rn * dxn`` in place as the gradient through ``xn = rn * x``; ``inner = sum(dxn * xn)``."""
    d = load_rows(d_raw, start, rows, row_stride, first, cols, width)
    d -= load_rows(x, start, rows, row_stride, first, cols, width) * (rn * rn * inner)[:, None]
    store_rows(d_raw, d, start, rows, row_stride, first, cols, width)


@triton.jit
def value_tiles(do, vT, drT, start, rows, HV, hv, at_chunk, vs, V, VP: tl.constexpr):
    """do ``[C, vs]``, v' ``[vs, C]`` and dr ``[C, vs]`` in the workspace's dtype."""
    tall = at_chunk * (VP * C) + vs[:, None] * C + tl.arange(0, C)[None, :]
    dot = load_rows(do, start, rows, HV * V, hv * V, vs, V).to(vT.dtype.element_ty)
    return dot, tl.load(vT + tall), tl.trans(tl.load(drT + tall))


@triton.jit
def grads_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, do, rn, hT, dhT, vT, drT,
    dq, dk, dv, dg, dbeta, dA_part, dbias_part,
    scale, lower_bound, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, SCALAR: tl.constexpr,
    L2NORM: tl.constexpr, GROUPED: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, PRECISE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``.

    ``dq`` and ``dk`` have HV heads. GROUPED: they are gradients of the normalised q and k, to be summed over each
    group and taken through the norm by a later kernel; otherwise they are final.
    """
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid - slot * HV
    start, rows = chunk_of_slot(cu_seqlens, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    at_chunk = pid.to(tl.int64)
    r = tl.arange(0, C)
    i = r[:, None]
    j = r[None, :]
    dtype = hT.dtype.element_ty

    raw_beta = load_vector(beta, start, rows, HV, hv)
    b = activated_beta(raw_beta, rows, BETA)
    db = tl.zeros([C], tl.float32)
    M1 = tl.zeros([C, C], tl.float32)
    M2 = tl.zeros([C, C], tl.float32)
    dot, vt, dr = value_tiles(do, vT, drT, start, rows, HV, hv, at_chunk, tl.arange(0, BV), V, VP)
    for v0 in range(0, VP, BV):
        vs = v0 + tl.arange(0, BV)
        if VP > BV:
            dot, vt, dr = value_tiles(do, vT, drT, start, rows, HV, hv, at_chunk, vs, V, VP)
        d = dr.to(tl.float32)
        db += tl.sum(d * load_rows(v, start, rows, HV * V, hv * V, vs, V), 1)
        store_rows(dv, b[:, None] * d, start, rows, HV * V, hv * V, vs, V)
        M1 = mma_acc(dot, vt, M1, DOT)
        M2 = mma_acc(dr, vt, M2, DOT)
    M1 *= scale
    diagonal = tl.sum(tl.where(i == j, M1, 0.0), 1)[:, None]
    M1 = tl.where(i > j, M1, 0.0)
    M2 = tl.where(i > j, -M2, 0.0)

    a_exp = gate_rate(A_log, hv, HAS_A)
    rq = tl.full([C], 1.0, tl.float32)
    rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        rq = tl.load(rn + 2 * C * at_chunk + r)
        rk = tl.load(rn + 2 * C * at_chunk + C + r)
    if SCALAR:
        xg = gate_input_scalar(g, dt_bias, start, rows, HV, hv, HAS_BIAS)
        gc = tl.cumsum(steps(xg, a_exp, lower_bound, r < rows, GATE, ASM), 0)
        total = tl.min(gc, 0)
        decay = tl.exp2(tl.minimum(gc[:, None] - gc[None, :], 0.0))
        M1 = (M1 * decay).to(dtype)
        M2 = (M2 * decay).to(dtype)
        down = tl.exp2(gc)[:, None]
        rest = tl.exp2(total - gc)[:, None]
        dgc_row = tl.zeros([C], tl.float32)
        dlast_row = 0.0
    else:
        M2 = (M2 + tl.trans(b[:, None] * M2)).to(dtype)
        M1 = (M1 + tl.trans(M1)).to(dtype)

    inner_q = tl.zeros([C], tl.float32)
    inner_k = tl.zeros([C], tl.float32)
    da = 0.0
    for first in range(0, KP, BK):
        cols = first + tl.arange(0, BK)
        dqt = tl.zeros([C, BK], tl.float32)
        x = tl.zeros([C, BK], tl.float32)
        ci = tl.zeros([C, BK], tl.float32)
        dlast = tl.zeros([BK], tl.float32)
        for v0 in range(0, VP, BV):
            vs = v0 + tl.arange(0, BV)
            if VP > BV:
                dot, vt, dr = value_tiles(do, vT, drT, start, rows, HV, hv, at_chunk, vs, V, VP)
            flat = at_chunk * (VP * KP) + vs[:, None] * KP + cols[None, :]
            ht = tl.load(hT + flat)
            dht = tl.load(dhT + flat)
            dlast += tl.sum(ht.to(tl.float32) * dht.to(tl.float32), 0)
            dqt = mma_acc(dot, ht, dqt, DOT)
            x = mma_acc(dr, ht, x, DOT)
            ci = mma_acc(tl.trans(vt), dht, ci, DOT)
        if not SCALAR:
            inside = (r < rows)[:, None] & (cols < K)[None, :]
            xg = gate_input(g, dt_bias, start, rows, HV, hv, cols, K, HAS_BIAS)
            step = steps(xg, a_exp, lower_bound, inside, GATE, ASM)
            total = tl.sum(step, 0)
            hi, lo = halves(step, DOT)
            gc = sum_rows(up_to_row(), hi, lo, DOT)
            dlast *= tl.exp2(total)
            down = exp2(gc, ASM)
            rest = decays_after(gc, total, hi, lo, PRECISE, DOT, ASM)
        qt = load_rows(q, start, rows, H * K, h * K, cols, K) * rq[:, None]
        kt = load_rows(k, start, rows, H * K, h * K, cols, K) * rk[:, None]
        dqt *= scale * down
        x *= -down
        ci *= rest
        if SCALAR:
            q_op = operand(qt, DOT)
            k_op = operand(kt, DOT)
            dqt = mma_acc(M1, k_op, dqt, DOT)
            x = mma_acc(M2, k_op, x, DOT)
            col = mma(tl.trans(M1), q_op, DOT)
            col = mma_acc(tl.trans(M2), operand(b[:, None] * kt, DOT), col, DOT) + ci
            dkt = b[:, None] * x
            by_k = k_op.to(tl.float32)
            dgc_row += tl.sum(q_op.to(tl.float32) * dqt + by_k * (dkt - col), 1)
            dlast_row += tl.sum(tl.sum(by_k * ci, 1), 0) + tl.exp2(total) * tl.sum(dlast, 0)
            dkt += col
            db += tl.sum(kt * x, 1)
        else:
            db += tl.sum(kt * x, 1)
            x *= b[:, None]
            dkt = x + ci
            dlast += tl.sum(kt * ci, 0)
            dgc = qt * dqt + kt * (x - ci)
            dqt, dkt, dgc, db = channel_grads(
                qt, kt, b, gc, hi, lo, M1, M2, dqt, dkt, dgc, db, PRECISE, DOT, ASM
            )
            hi, lo = halves(dgc, DOT)
            dstep = sum_rows(j >= i, hi, lo, DOT) + dlast[None, :]
            xg = gate_input(g, dt_bias, start, rows, HV, hv, cols, K, HAS_BIAS)
            dx, da_tile = gate_back(dstep, xg, a_exp, lower_bound, inside, GATE, ASM)
            store_rows(dg, dx, start, rows, HV * K, hv * K, cols, K)
            if HAS_BIAS:
                tl.store(dbias_part + at_chunk * KP + cols, tl.sum(dx, 0))
            if HAS_A:
                da += tl.sum(tl.sum(da_tile, 1), 0)
        dqt += diagonal * kt
        dkt += diagonal * qt
        if L2NORM and not GROUPED:
            inner_q += tl.sum(dqt * qt, 1)
            inner_k += tl.sum(dkt * kt, 1)
            dqt *= rq[:, None]
            dkt *= rk[:, None]
        store_rows(dq, dqt, start, rows, HV * K, hv * K, cols, K)
        store_rows(dk, dkt, start, rows, HV * K, hv * K, cols, K)

    store_vector(dbeta, beta_back(db, raw_beta, BETA), start, rows, HV, hv)
    if SCALAR:
        dstep = tl.cumsum(dgc_row, 0, reverse=True) + dlast_row
        dx, da_row = gate_back(dstep, xg, a_exp, lower_bound, r < rows, GATE, ASM)
        store_vector(dg, dx, start, rows, HV, hv)
        if HAS_BIAS:
            tl.store(dbias_part + pid, tl.sum(dx, 0))
        if HAS_A:
            da = tl.sum(da_row, 0)
    if HAS_A:
        tl.store(dA_part + pid, da)
    if L2NORM and not GROUPED:
        tl.debug_barrier()
        for first in range(0, KP, BK):
            cols = first + tl.arange(0, BK)
            norm_back(q, rq, dq, inner_q, start, rows, H * K, h * K, cols, K)
            norm_back(k, rk, dk, inner_k, start, rows, H * K, h * K, cols, K)
