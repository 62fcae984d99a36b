"""Launch 3 of 3 of the chunk backward, any gate with one value per channel: every input gradient of a chunk.

Grid: one program per chunk and value head. ``S`` is the state at the chunk's start and ``dS`` the
gradient of the state at its end; ``v'`` (v_new) and ``dr`` (the gradient of the right-hand side that
the inverse is multiplied with) come from the scans::

    dv   = beta dr
    dAqk = scale tril(do v'^T)   dL = -tril(dr v'^T, -1)            (inv = (I + L)^-1)
    dq   = scale 2^gc (do S^T)             + sum_j dAqk_ij k_j 2^(gc_i - gc_j)
    x    = -2^gc (dr S^T)                  + sum_j dL_ij   k_j 2^(gc_i - gc_j)
    col  = 2^(gc_last - gc) (v' dS^T)      + sum_i (dAqk_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
    dk   = beta x + col          dbeta = dr . v + k . x
    dgc  = q dq + k beta x - k col, plus for the last token
           2^gc_last sum_v(S dS) + sum_i (k 2^(gc_last - gc) (v' dS^T))_i
    dg   = dgc summed from the token to the chunk's end, then through the gate

The chunk's halves (chunk_backward_levels) follow one another; pairs across them are decayed to and
from the boundary between them. ``dgc`` multiplies by the same rounded operands as the products, so
that terms which cancel exactly also cancel in bfloat16. That is why beta is multiplied into an
operand with k: dL and beta dL would be rounded differently.

With fast decays the largest terms are those that no decay multiplies: what a half's last token adds
to the state after it. Products of operands wider than bfloat16 (WIDE_OPERANDS) are precise enough to
leave them out of ``dgc``: each step then sums only the terms that its decay multiplies.

dAqk and dL, each with its transpose, are stored in the tiles of Aqk and inv, and values of one number
per token in ``row_values``. They are loaded again where they are used, since registers are what
limits this kernel. ::

    pairs_q[t, r] = dAqk_tr (t > r), dAqk_rt (t < r)        pairs_k[t, r] = dL_tr (t > r), dL_rt (t < r)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_gate import (
    gate_grad_as,
    gate_grads,
    gate_tile,
    has_gradient,
    steps,
    store_beta_grad,
    sum_bias,
)
from .chunk_backward_io import (
    ROW_BETA,
    ROW_DBETA,
    ROW_DIAGONAL,
    ROW_RK,
    ROW_RQ,
    load_rows,
    store_rows,
    store_zero_grads,
)
from .chunk_backward_levels import S, block, level_grads, store_block
from .chunk_backward_sums import rounded, split_bf16, sum_tokens, sum_tokens_exact
from .common import chunk_of_program, exp2, mma, mma_acc, product
from .gate_and_beta import load_gate_rate
from .groups import Gradients, Inputs, Place, ScannedTiles

C = tl.constexpr(64)


@triton.jit
def second_half(at):
    """The place of a chunk's second half."""
    return Place(at.start + S, at.rows - S, at.H, at.h, at.HV, at.hv, at.K, at.V)


@triton.jit
def value_grads(v, dv, dr, b, at, vs):
    """Stores dv of one half; returns its part of dbeta."""
    dr = tl.trans(dr).to(tl.float32)
    stride = at.HV * at.V
    first = at.hv * at.V
    store_rows(dv, b[:, None] * dr, at.start, at.rows, stride, first, vs, at.V, S)
    return tl.sum(product(dr, load_rows(v, at.start, at.rows, stride, first, vs, at.V, S).to(tl.float32)), 1)


@triton.jit
def store_pairs(pairs_q, pairs_k, A, L, diagonal):
    """Stores one half's diagonal blocks, and the diagonal of ``A`` itself at ``diagonal``."""
    t = tl.arange(0, S)
    A_own = tl.sum(tl.where(t[:, None] == t[None, :], A, 0.0), 1)
    tl.store(diagonal + t, A_own)
    A = tl.where(t[:, None] > t[None, :], A, 0.0)
    L = tl.where(t[:, None] > t[None, :], L, 0.0)
    store_block(pairs_q, A + tl.trans(A), 0, 0)
    store_block(pairs_k, L + tl.trans(L), 0, 0)


@triton.jit
def value_part(
    v, dv, do, vT, drT, pairs_q, pairs_k, row_values, at, scale,
    VP: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Everything without key channels: dv, dAqk, dL, and the part of dbeta from v."""
    later = second_half(at)
    t = tl.arange(0, S)
    b0 = tl.load(row_values + ROW_BETA * C + t)
    b1 = tl.load(row_values + ROW_BETA * C + S + t)
    db0 = tl.zeros([S], tl.float32)
    db1 = tl.zeros([S], tl.float32)
    A00 = tl.zeros([S, S], tl.float32)
    A10 = tl.zeros([S, S], tl.float32)
    A11 = tl.zeros([S, S], tl.float32)
    L00 = tl.zeros([S, S], tl.float32)
    L10 = tl.zeros([S, S], tl.float32)
    L11 = tl.zeros([S, S], tl.float32)
    dtype = vT.dtype.element_ty
    for first in range(0, VP, BV):
        vs = first + tl.arange(0, BV)
        tall = vs[:, None] * C + t[None, :]
        v0 = tl.load(vT + tall)
        do0 = load_rows(do, at.start, at.rows, at.HV * at.V, at.hv * at.V, vs, at.V, S).to(dtype)
        A00 = mma_acc(do0, v0, A00, DOT)
        dr0 = tl.load(drT + tall)
        db0 += value_grads(v, dv, dr0, b0, at, vs)
        L00 = mma_acc(tl.trans(dr0), v0, L00, DOT)
        do1 = load_rows(do, later.start, later.rows, at.HV * at.V, at.hv * at.V, vs, at.V, S).to(dtype)
        A10 = mma_acc(do1, v0, A10, DOT)
        dr1 = tl.load(drT + tall + S)
        db1 += value_grads(v, dv, dr1, b1, later, vs)
        L10 = mma_acc(tl.trans(dr1), v0, L10, DOT)
        v1 = tl.load(vT + tall + S)
        A11 = mma_acc(do1, v1, A11, DOT)
        L11 = mma_acc(tl.trans(dr1), v1, L11, DOT)
    own = row_values + ROW_DIAGONAL * C
    store_pairs(pairs_q, pairs_k, scale * A00, -L00, own)
    store_pairs(pairs_q + S * C + S, pairs_k + S * C + S, scale * A11, -L11, own + S)
    A10 *= scale
    store_block(pairs_q, A10, S, 0)
    store_block(pairs_q, tl.trans(A10), 0, S)
    store_block(pairs_k, -L10, S, 0)
    store_block(pairs_k, -tl.trans(L10), 0, S)
    tl.store(row_values + ROW_DBETA * C + t, db0)
    tl.store(row_values + ROW_DBETA * C + S + t, db1)


@triton.jit
def normalised(x, at, cols, norms, L2NORM: tl.constexpr):
    """float32 tile ``[cols, S]`` of one half of q or k, times the reciprocal norms at ``norms``."""
    x = tl.trans(load_rows(x, at.start, at.rows, at.H * at.K, at.h * at.K, cols, at.K, S)).to(tl.float32)
    if L2NORM:
        x *= tl.load(norms + tl.arange(0, S))[None, :]
    return x


@triton.jit
def gate_steps(g, dt_bias, a_exp, lower_bound, at, cols, GATE: tl.constexpr, ASM: tl.constexpr):
    """log2 decays of one half, ``[cols, S]``."""
    x = gate_tile(g, dt_bias, at, cols, S)
    inside = (cols < at.K)[:, None] & (tl.arange(0, S) < at.rows)[None, :]
    return steps(x, a_exp, lower_bound, inside, GATE, ASM)


@triton.jit
def finish_half(
    q1, k1, dqt, x, col, dgc, passing, later_sum, inputs, grads, row_values, a_exp, lower_bound, at, cols, kb,
    GATE: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Stores dg, dq, dk of one half; returns its sums over tokens for dt_bias and A_log."""
    WIDE_OPERANDS: tl.constexpr = DOT != "bf16"
    t = tl.arange(0, S)
    dstep = sum_tokens_exact(dgc, t[:, None] >= t[None, :], DOT) + later_sum[:, None]
    if WIDE_OPERANDS:
        dstep += sum_tokens_exact(passing, t[:, None] < t[None, :], DOT)
    xg = gate_tile(inputs.g, inputs.dt_bias, at, cols, S)
    inside = (cols < at.K)[:, None] & (t < at.rows)[None, :]
    step = steps(xg, a_exp, lower_bound, inside, GATE, ASM)
    differentiable = inside & has_gradient(step, DOT)
    stride = at.HV * at.K
    first = at.hv * at.K
    kind: tl.constexpr = grads.dg.dtype.element_ty
    dx, da = gate_grads(dstep, xg, step, a_exp, lower_bound, differentiable, GATE, ASM, kind)
    store_rows(
        grads.dg, tl.trans(gate_grad_as(dx, GATE, kind)), at.start, at.rows, stride, first, cols, at.K, S
    )
    tl.store(row_values + (ROW_DBETA + 1 + kb) * C + t, tl.sum(product(k1, x), 0))
    own = tl.load(row_values + ROW_DIAGONAL * C + t)[None, :]
    dqt += own * k1
    x *= tl.load(row_values + ROW_BETA * C + t)[None, :]
    x += col + own * q1
    store_rows(grads.dq, tl.trans(dqt), at.start, at.rows, stride, first, cols, at.K, S)
    store_rows(grads.dk, tl.trans(x), at.start, at.rows, stride, first, cols, at.K, S)
    return sum_bias(dx, 1, GATE), tl.sum(da, 1)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_backward_grads_kernel(
    inputs: Inputs, do, row_values, scanned: ScannedTiles, pairs_q, pairs_k, grads: Gradients,
    scale, lower_bound, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``, with one slot more than chunks need when packed.

    ``dq`` and ``dk`` have HV heads. With L2NORM they are gradients of the normalised q and k: no program has all the
    channels of a row.
    """
    pid, hv, start, rows = chunk_of_program(inputs.cu_seqlens, N, T, NT, HV, C, PACKED)
    if rows <= 0:
        if PACKED:
            store_zero_grads(grads, inputs.cu_seqlens, N, pid // HV, T, HV, hv, K, V, KP, VP, False, C)
        return
    h = hv // (HV // H)
    tile = pid.to(tl.int64)
    vT = scanned.vT + tile * (VP * C)
    drT = scanned.drT + tile * (VP * C)
    hT = scanned.hT + tile * (VP * KP)
    dhT = scanned.dhT + tile * (VP * KP)
    pairs_q += tile * (C * C)
    pairs_k += tile * (C * C)
    row_values += tile * ROWS
    dtype = vT.dtype.element_ty
    WIDE_OPERANDS: tl.constexpr = DOT != "bf16"
    at = Place(start, rows, H, h, HV, hv, K, V)
    value_part(inputs.v, grads.dv, do, vT, drT, pairs_q, pairs_k, row_values, at, scale, VP, BV, DOT)
    tl.debug_barrier()

    t = tl.arange(0, S)[:, None]
    r = tl.arange(0, S)[None, :]
    later = second_half(at)
    norms_q = row_values + ROW_RQ * C
    norms_k = row_values + ROW_RK * C
    a_exp = load_gate_rate(inputs.A_log, hv)
    da = 0.0
    for kb in range(KP // BK):
        cols = kb * BK + tl.arange(0, BK)
        # The second half. Its pairs across the boundary and its sums first need some values of the first half.
        step = gate_steps(inputs.g, inputs.dt_bias, a_exp, lower_bound, at, cols, GATE, ASM)
        hi, lo = split_bf16(step, DOT)
        total0 = tl.sum(step, 1)
        k0_left = normalised(inputs.k, at, cols, norms_k, L2NORM)
        k0_left *= exp2(sum_tokens(hi, lo, t > r, DOT), ASM)
        step = gate_steps(inputs.g, inputs.dt_bias, a_exp, lower_bound, later, cols, GATE, ASM)
        hi, lo = split_bf16(step, DOT)
        total1 = tl.sum(step, 1)
        dqt = tl.zeros([BK, S], tl.float32)
        x = tl.zeros([BK, S], tl.float32)
        col = tl.zeros([BK, S], tl.float32)
        col0 = tl.zeros([BK, S], tl.float32)
        carried = tl.zeros([BK], tl.float32)
        for first in range(0, VP, BV):
            vs = first + tl.arange(0, BV)
            ht = tl.load(hT + vs[:, None] * KP + cols[None, :])
            dht = tl.load(dhT + vs[:, None] * KP + cols[None, :])
            carried += tl.sum(product(ht.to(tl.float32), dht.to(tl.float32)), 0)
            ht = tl.trans(ht)
            dht = tl.trans(dht)
            tall = vs[:, None] * C + r
            col0 = mma_acc(dht, tl.load(vT + tall), col0, DOT)
            col = mma_acc(dht, tl.load(vT + tall + S), col, DOT)
            x = mma_acc(ht, tl.load(drT + tall + S), x, DOT)
            do1 = load_rows(do, later.start, later.rows, HV * V, hv * V, vs, V, S).to(dtype)
            dqt = mma_acc(ht, tl.trans(do1), dqt, DOT)
        carried *= exp2(total0 + total1, ASM)
        from_left = tl.sum(k0_left * col0, 1) * exp2(total1, ASM)
        later_right = carried + from_left
        if not WIDE_OPERANDS:
            carried = later_right
        q1 = normalised(inputs.q, later, cols, norms_q + S, L2NORM)
        k1 = normalised(inputs.k, later, cols, norms_k + S, L2NORM)
        b = tl.load(row_values + ROW_BETA * C + S + r)
        f = exp2(sum_tokens(hi, lo, t <= r, DOT), ASM)
        before = exp2(total0, ASM)[:, None]
        dqt *= before * scale
        x *= -before
        if WIDE_OPERANDS:
            across = tl.sum(q1 * f * dqt + b * k1 * f * x, 1)
        k0_left = rounded(k0_left, DOT)
        dqt += mma(k0_left, block(pairs_q, 0, S), DOT)
        x += mma(k0_left, block(pairs_k, 0, S), DOT)
        dgc = rounded(q1 * f, DOT) * dqt + rounded(b * k1 * f, DOT) * x
        if not WIDE_OPERANDS:
            across = tl.sum(dgc, 1)
        dqt *= f
        x *= f
        col *= exp2(sum_tokens(hi, lo, t > r, DOT), ASM)
        passing = k1 * col
        if not WIDE_OPERANDS:
            dgc -= passing
            later_right += tl.sum(passing, 1)
        dqt, x, col, dgc = level_grads(
            q1, k1, b, hi, lo, pairs_q + S * C + S, pairs_k + S * C + S, dqt, x, col, dgc, DOT, ASM
        )
        dbias, da1 = finish_half(
            q1, k1, dqt, x, col, dgc, passing, later_right, inputs, grads, row_values + S, a_exp, lower_bound, later,
            cols, kb, GATE, DOT, ASM,
        )  # fmt: skip

        # The first half. Its pairs across the boundary first need some values of the second half.
        f = exp2(sum_tokens(hi, lo, t <= r, DOT), ASM)
        q1 = normalised(inputs.q, later, cols, norms_q + S, L2NORM)
        p = mma(q1 * f, block(pairs_q, S, 0), DOT)
        k1 = normalised(inputs.k, later, cols, norms_k + S, L2NORM)
        b = tl.load(row_values + ROW_BETA * C + S + r)
        p = mma_acc(b * k1 * f, block(pairs_k, S, 0), p, DOT)
        step = gate_steps(inputs.g, inputs.dt_bias, a_exp, lower_bound, at, cols, GATE, ASM)
        hi, lo = split_bf16(step, DOT)
        dqt = tl.zeros([BK, S], tl.float32)
        x = tl.zeros([BK, S], tl.float32)
        col = tl.zeros([BK, S], tl.float32)
        for first in range(0, VP, BV):
            vs = first + tl.arange(0, BV)
            ht = tl.trans(tl.load(hT + vs[:, None] * KP + cols[None, :]))
            dht = tl.trans(tl.load(dhT + vs[:, None] * KP + cols[None, :]))
            tall = vs[:, None] * C + r
            col = mma_acc(dht, tl.load(vT + tall), col, DOT)
            x = mma_acc(ht, tl.load(drT + tall), x, DOT)
            do0 = load_rows(do, start, rows, HV * V, hv * V, vs, V, S).to(dtype)
            dqt = mma_acc(ht, tl.trans(do0), dqt, DOT)
        q1 = normalised(inputs.q, at, cols, norms_q, L2NORM)
        k1 = normalised(inputs.k, at, cols, norms_k, L2NORM)
        b = tl.load(row_values + ROW_BETA * C + r)
        f = exp2(sum_tokens(hi, lo, t <= r, DOT), ASM)
        dqt *= f * scale
        x *= -f
        f = exp2(sum_tokens(hi, lo, t > r, DOT), ASM)
        col *= exp2(total1, ASM)[:, None]
        dgc = q1 * dqt + k1 * (b * x)
        if not WIDE_OPERANDS:
            dgc = dgc - (k1 * f) * col - rounded(k1 * f, DOT) * p
        col = f * (col + p)
        passing = k1 * col
        dqt, x, col, dgc = level_grads(q1, k1, b, hi, lo, pairs_q, pairs_k, dqt, x, col, dgc, DOT, ASM)
        dbias0, da0 = finish_half(
            q1, k1, dqt, x, col, dgc, passing, carried + across, inputs, grads, row_values, a_exp, lower_bound, at,
            cols, kb, GATE, DOT, ASM,
        )  # fmt: skip
        if inputs.dt_bias is not None:
            tl.store(grads.dbias_part + tile * KP + cols, dbias + dbias0)
        if inputs.A_log is not None:
            da += tl.sum(da0 + da1, 0)

    if inputs.A_log is not None:
        tl.store(grads.dA_part + pid, da)
    tl.debug_barrier()
    c = tl.arange(0, C)
    db = tl.load(row_values + ROW_DBETA * C + c)
    for kb in range(KP // BK):
        db += tl.load(row_values + (ROW_DBETA + 1 + kb) * C + c)
    store_beta_grad(grads.dbeta, inputs.beta, db, at, 0, C, BETA)
