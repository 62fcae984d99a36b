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
    BLOCK,
    BOUNDED_LEVELS,
    LEVELS,
    C,
    activated_beta,
    after_row,
    block_pairs,
    block_prefix,
    gate_input,
    gate_input_scalar,
    gate_rate,
    halves,
    load_rows,
    load_vector,
    right_rows,
    steps,
    sum_rows,
    to_boundary,
    up_to_row,
)
from .common import LOG2E, chunk_of_slot, log2_decay_grad, mma, mma_acc, operand, sigmoid


@triton.jit
def channel_grads(qt, kt, b, hi, lo, M1, M2, dq, x, dgc, lower_bound, BOUNDED: tl.constexpr, DOT: tl.constexpr):
    """Adds the pairs ``i > j`` inside the chunk to dq, x and dgc; returns them and the column part of dk.

    ``M1``: strictly lower dAqk plus its transpose. ``M2``: dL plus the transpose of ``beta_i dL_ij``.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    b = b[:, None]
    col = tl.zeros_like(dq)
    levels = BOUNDED_LEVELS if BOUNDED else LEVELS
    for level in range(levels):
        h = 32 >> level
        f = tl.exp2(sum_rows(to_boundary(h), hi, lo, DOT))
        right = right_rows(h)[:, None]
        both = ((i // h) ^ (j // h)) == 1
        z = operand(tl.where(right, qt, kt) * f, DOT)
        p = mma(tl.where(both, M1, 0.0), z, DOT)
        e = z.to(tl.float32) * p
        p *= f
        dq += tl.where(right, p, 0.0)
        col += tl.where(right, 0.0, p)
        dgc += tl.where(right, e, -e)
        z = operand(kt * f, DOT)
        p = mma(tl.where(both, M2, 0.0), z, DOT)
        e = z.to(tl.float32) * p
        p *= f
        x += tl.where(right, p, 0.0)
        col += tl.where(right, 0.0, p)
        dgc += tl.where(right, b * e, -e)
    if BOUNDED:
        centre = lower_bound * LOG2E * (BLOCK // 2)
        e = sum_rows(block_prefix(), hi, lo, DOT) - centre
        f = tl.exp2(e)
        r = tl.exp2(-e)
        below = block_pairs()
        above = (i // BLOCK == j // BLOCK) & (i < j)
        z = operand(kt * r, DOT)
        p = mma(tl.where(below, M1, 0.0), z, DOT)
        zq = operand(qt * f, DOT)
        dq += f * p
        dgc += zq.to(tl.float32) * p
        p = mma(tl.where(below, M2, 0.0), z, DOT)
        zk = operand(kt * f, DOT)
        x += f * p
        dgc += b * zk.to(tl.float32) * p
        p = mma(tl.where(above, M1, 0.0), zq, DOT)
        p = mma_acc(tl.where(above, M2, 0.0), zk, p, DOT)
        col += r * p
        dgc -= z.to(tl.float32) * p
    return dq, x, dgc, col


@triton.jit
def gate_back(dstep, x, a_exp, lower_bound, inside, GATE: tl.constexpr):
    """Gradient of the raw gate, and what to add up for dA_log, from the gradient of the natural-log decay."""
    dx = tl.where(inside, dstep * log2_decay_grad(x, a_exp, lower_bound, GATE), 0.0)
    if GATE == 1:
        da = dstep * (steps(x, a_exp, lower_bound, inside, GATE) / LOG2E)
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
    r = tl.arange(0, C)
    at = (start + r)[:, None] * row_stride + first + cols[None, :]
    mask = (r < rows)[:, None] & (cols < width)[None, :]
    t = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_raw + at, mask=mask, other=0.0).to(tl.float32)
    d -= t * (rn * rn * inner)[:, None]
    tl.store(d_raw + at, d.to(d_raw.dtype.element_ty), mask=mask)


@triton.jit
def grads_kernel(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, do, inv, rn, hT, dhT, vT, dvT,
    dq, dk, dv, dg, dbeta, dA_part, dbias_part,
    scale, lower_bound, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr,
    GATE: tl.constexpr, HAS_A: tl.constexpr, HAS_BIAS: tl.constexpr, SCALAR: tl.constexpr,
    BOUNDED: tl.constexpr, L2NORM: tl.constexpr, GROUPED: tl.constexpr, BETA: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr,
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
    vs = tl.arange(0, VP)
    qk_stride = H * K
    k_stride = HV * K
    v_stride = HV * V
    dtype = hT.dtype.element_ty
    tall = at_chunk * (VP * C) + vs[:, None] * C + j

    raw_beta = load_vector(beta, start, rows, HV, hv)
    b = activated_beta(raw_beta, rows, BETA)
    dot = load_rows(do, start, rows, v_stride, hv * V, vs, V).to(dtype)
    vt = tl.load(vT + tall)
    square = (at_chunk * C + i) * C + j
    dr = mma(tl.trans(tl.load(inv + square)), tl.trans(tl.load(dvT + tall)), DOT)
    db = tl.sum(dr * load_rows(v, start, rows, v_stride, hv * V, vs, V), 1)
    v_at = (start + r)[:, None] * v_stride + hv * V + vs[None, :]
    v_mask = (r < rows)[:, None] & (vs < V)[None, :]
    tl.store(dv + v_at, (b[:, None] * dr).to(dv.dtype.element_ty), mask=v_mask)
    dr = dr.to(dtype)
    M1 = scale * mma(dot, vt, DOT)
    M2 = -mma(dr, vt, DOT)
    diagonal = tl.sum(tl.where(i == j, M1, 0.0), 1)[:, None]
    M1 = tl.where(i > j, M1, 0.0)
    M2 = tl.where(i > j, M2, 0.0)

    a_exp = gate_rate(A_log, hv, HAS_A)
    rq = tl.full([C], 1.0, tl.float32)
    rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        rq = tl.load(rn + 2 * C * at_chunk + r)
        rk = tl.load(rn + 2 * C * at_chunk + C + r)
    if SCALAR:
        xg = gate_input_scalar(g, dt_bias, start, rows, HV, hv, HAS_BIAS)
        gc = tl.cumsum(steps(xg, a_exp, lower_bound, r < rows, GATE), 0)
        total = tl.min(gc, 0)
        decay = tl.exp2(tl.minimum(gc[:, None] - gc[None, :], 0.0))
        M1 = (M1 * decay).to(dtype)
        M2 = (M2 * decay).to(dtype)
        down = tl.exp2(gc)[:, None]
        rest = tl.exp2(total - gc)[:, None]
        dgc_row = tl.zeros([C], tl.float32)
        dlast_row = 0.0
    else:
        M2 += tl.trans(b[:, None] * M2)
        M1 += tl.trans(M1)

    inner_q = tl.zeros([C], tl.float32)
    inner_k = tl.zeros([C], tl.float32)
    da = 0.0
    for first in range(0, KP, BK):
        cols = first + tl.arange(0, BK)
        inside = (r < rows)[:, None] & (cols < K)[None, :]
        qt = load_rows(q, start, rows, qk_stride, h * K, cols, K) * rq[:, None]
        kt = load_rows(k, start, rows, qk_stride, h * K, cols, K) * rk[:, None]
        flat = at_chunk * (VP * KP) + vs[:, None] * KP + cols[None, :]
        ht = tl.load(hT + flat)
        dht = tl.load(dhT + flat)
        dlast = tl.sum(ht.to(tl.float32) * dht.to(tl.float32), 0)
        if not SCALAR:
            xg = gate_input(g, dt_bias, start, rows, HV, hv, cols, K, HAS_BIAS)
            step = steps(xg, a_exp, lower_bound, inside, GATE)
            hi, lo = halves(step, DOT)
            dlast *= tl.exp2(tl.sum(step, 0))
            down = tl.exp2(sum_rows(up_to_row(), hi, lo, DOT))
            rest = tl.exp2(sum_rows(after_row(), hi, lo, DOT))
        dqt = (scale * down) * mma(dot, ht, DOT)
        x = -down * mma(dr, ht, DOT)
        ci = rest * mma(tl.trans(vt), dht, DOT)
        if SCALAR:
            q_op = operand(qt, DOT)
            k_op = operand(kt, DOT)
            dqt = mma_acc(M1, k_op, dqt, DOT)
            x = mma_acc(M2, k_op, x, DOT)
            col = mma(tl.trans(M1), q_op, DOT)
            col = mma_acc(tl.trans(M2), operand(b[:, None] * kt, DOT), col, DOT)
            by_q = q_op.to(tl.float32) * dqt
            by_k = k_op.to(tl.float32)
            dgc_row += tl.sum(by_q + by_k * (b[:, None] * x - col - ci), 1)
            dlast_row += tl.sum(tl.sum(by_k * ci, 1), 0) + tl.exp2(total) * tl.sum(dlast, 0)
        else:
            carried = kt * ci
            dgc = qt * dqt + (b[:, None] * kt) * x - carried
            dlast += tl.sum(carried, 0)
            dqt, x, dgc, col = channel_grads(
                qt, kt, b, hi, lo, M1, M2, dqt, x, dgc, lower_bound, BOUNDED, DOT
            )
            hi, lo = halves(dgc, DOT)
            dstep = sum_rows(j >= i, hi, lo, DOT) + dlast[None, :]
            dx, da_tile = gate_back(dstep, xg, a_exp, lower_bound, inside, GATE)
            g_at = (start + r)[:, None] * k_stride + hv * K + cols[None, :]
            tl.store(dg + g_at, dx.to(dg.dtype.element_ty), mask=inside)
            if HAS_BIAS:
                tl.store(dbias_part + at_chunk * KP + cols, tl.sum(dx, 0))
            if HAS_A:
                da += tl.sum(tl.sum(da_tile, 1), 0)
        dqt += diagonal * kt
        dkt = b[:, None] * x + col + ci + diagonal * qt
        db += tl.sum(kt * x, 1)
        at = (start + r)[:, None] * k_stride + hv * K + cols[None, :]
        if L2NORM and not GROUPED:
            inner_q += tl.sum(dqt * qt, 1)
            inner_k += tl.sum(dkt * kt, 1)
            dqt *= rq[:, None]
            dkt *= rk[:, None]
        tl.store(dq + at, dqt.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + at, dkt.to(dk.dtype.element_ty), mask=inside)

    b_at = (start + r) * HV + hv
    tl.store(dbeta + b_at, beta_back(db, raw_beta, BETA).to(dbeta.dtype.element_ty), mask=r < rows)
    if SCALAR:
        dstep = tl.cumsum(dgc_row, 0, reverse=True) + dlast_row
        dx, da_row = gate_back(dstep, xg, a_exp, lower_bound, r < rows, GATE)
        tl.store(dg + b_at, dx.to(dg.dtype.element_ty), mask=r < rows)
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
            norm_back(q, rq, dq, inner_q, start, rows, qk_stride, h * K, cols, K)
            norm_back(k, rk, dk, inner_k, start, rows, qk_stride, h * K, cols, K)
