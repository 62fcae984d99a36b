"""Launch 3 of 3 of the chunk backward for a gate with one value per head: every input gradient of a chunk.

The equations are those of chunk_backward_grads. Grid: one program per chunk and value head. With one
decay for all channels, ``2^(gc_i - gc_j)`` is a factor of the ``[C, C]`` matrices, and pairs need no
levels. The gradient of step t is the sum of all terms that its decay multiplies, so nothing is
subtracted: the pairs ``i >= t > j``, the state at the start read by rows ``i >= t``, rows ``j < t``
read by the state at the end, and the state carried from start to end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_gate import (
    beta_grad,
    gate_grad_as,
    gate_grads,
    gate_input_scalar,
    has_gradient,
    steps,
    sum_bias,
)
from .chunk_backward_io import (
    ROW_BETA,
    ROW_RK,
    ROW_RQ,
    load_rows,
    load_vector,
    store_rows,
    store_vector,
    store_zero_grads,
)
from .common import chunk_of_program, mma, mma_acc, operand, product
from .gate_and_beta import load_gate_rate
from .groups import Gradients, Inputs, Place, ScannedTiles


@triton.jit
def value_tiles(do, vT, drT, at, chunk, vs, VP: tl.constexpr, C: tl.constexpr):
    """do ``[C, vs]``, v' ``[vs, C]`` and dr ``[C, vs]`` in the workspace's dtype."""
    tall = chunk * (VP * C) + vs[:, None] * C + tl.arange(0, C)[None, :]
    dot = load_rows(do, at.start, at.rows, at.HV * at.V, at.hv * at.V, vs, at.V, C).to(vT.dtype.element_ty)
    return dot, tl.load(vT + tall), tl.trans(tl.load(drT + tall))


@triton.jit
def raw_product(x, y, acc, DOT: tl.constexpr):
    """``acc + x @ y^T`` of tiles as they are stored: 16-bit inputs are their own exact operands."""
    if DOT == "bf16":
        r = tl.dot(x, tl.trans(y), acc=acc)
    else:
        r = mma_acc(x, tl.trans(y), acc, DOT)
    return r


@triton.jit
def append(before, through, before_next, through_next):
    """Joins two runs of values; each is its sums without and with the last value, ``(0, value)`` for one value."""
    return through + before_next, through + through_next


@triton.jit
def sums_before(x, DOT: tl.constexpr):
    """``out[:, t] = sum of x[:, j] over j < t``.

    With fast gates the pairs that end at t can outweigh those before it by e^30. They are never added, so they need
    not be subtracted. With operands of 16 bits or tf32 such gates have gradient 0 (see has_gradient), and cumsum(x) - x
    is precise enough.
    """
    if DOT == "tf32x3" or DOT == "ieee":
        before, _ = tl.associative_scan((tl.zeros_like(x), x), 1, append)
    else:
        before = tl.cumsum(x, 1) - x
    return before


@triton.jit
def sum_before(x, C: tl.constexpr, DOT: tl.constexpr):
    """:func:`sums_before` of one row."""
    r = tl.arange(0, C)
    if DOT == "tf32x3" or DOT == "ieee":
        before = tl.sum(tl.where(r[:, None] < r[None, :], x[:, None], 0.0), 0)
    else:
        before = tl.cumsum(x, 0) - x
    return before


@triton.jit
def pair_steps(
    q, k, M1, M2, b, rq, rk, at,
    KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The gradient of each step t from the chunk's pairs ``i >= t > j``. ``M1``, ``M2``: decayed dAqk and dL."""
    r = tl.arange(0, C)
    qk = tl.zeros([C, C], tl.float32)
    kk = tl.zeros([C, C], tl.float32)
    stride = at.H * at.K
    first = at.h * at.K
    for block in range(0, KP, BK):
        cols = block + tl.arange(0, BK)
        kt = load_rows(k, at.start, at.rows, stride, first, cols, at.K, C)
        qk = raw_product(load_rows(q, at.start, at.rows, stride, first, cols, at.K, C), kt, qk, DOT)
        kk = raw_product(kt, kt, kk, DOT)
    pairs = (M1 * rq[:, None] * qk + M2 * (b * rk)[:, None] * kk) * rk[None, :]
    return tl.sum(tl.where(r[:, None] >= r[None, :], sums_before(pairs, DOT), 0.0), 0)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_backward_grads_scalar_kernel(
    inputs: Inputs, do, row_values, scanned: ScannedTiles, grads: Gradients,
    scale, lower_bound, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, ASM: tl.constexpr, C: tl.constexpr, DIAGONAL_AXIS: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``, with one slot more than chunks need when packed.

    ``DIAGONAL_AXIS``: the axis along which a ``[C, C]`` matrix that is 0 off its diagonal is summed to the diagonal.
    The bits are the same. Summed along 1, the diagonal has the layout of that matrix, and what it is multiplied with
    takes that layout too: with 8 warps four copies of each row of q and k. Summed along 0 it cannot.

    ``dq`` and ``dk`` have HV heads. With L2NORM and channels in several blocks they are gradients of the normalised q
    and k, otherwise they are through the norm.
    """
    pid, hv, start, rows = chunk_of_program(inputs.cu_seqlens, N, T, NT, HV, C, PACKED)
    if rows <= 0:
        if PACKED:
            store_zero_grads(grads, inputs.cu_seqlens, N, pid // HV, T, HV, hv, K, V, KP, VP, True, C)
        return
    h = hv // (HV // H)
    at = Place(start, rows, H, h, HV, hv, K, V)
    chunk = pid.to(tl.int64)
    r = tl.arange(0, C)
    i = r[:, None]
    j = r[None, :]
    dtype = scanned.hT.dtype.element_ty

    raw_beta = load_vector(inputs.beta, start, rows, HV, hv, C)
    row_values += chunk * ROWS
    b = tl.load(row_values + ROW_BETA * C + r)
    db = tl.zeros([C], tl.float32)
    M1 = tl.zeros([C, C], tl.float32)
    M2 = tl.zeros([C, C], tl.float32)
    dot, vt, dr = value_tiles(do, scanned.vT, scanned.drT, at, chunk, tl.arange(0, BV), VP, C)
    for v0 in range(0, VP, BV):
        vs = v0 + tl.arange(0, BV)
        if VP > BV:
            dot, vt, dr = value_tiles(do, scanned.vT, scanned.drT, at, chunk, vs, VP, C)
        d = dr.to(tl.float32)
        db += tl.sum(product(d, load_rows(inputs.v, start, rows, HV * V, hv * V, vs, V, C).to(tl.float32)), 1)
        store_rows(grads.dv, b[:, None] * d, start, rows, HV * V, hv * V, vs, V, C)
        M1 = mma_acc(dot, vt, M1, DOT)
        M2 = mma_acc(dr, vt, M2, DOT)
    M1 *= scale
    diagonal = tl.sum(tl.where(i == j, M1, 0.0), DIAGONAL_AXIS)[:, None]
    M1 = tl.where(i > j, M1, 0.0)
    M2 = tl.where(i > j, -M2, 0.0)

    a_exp = load_gate_rate(inputs.A_log, hv)
    rq = tl.full([C], 1.0, tl.float32)
    rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        rq = tl.load(row_values + ROW_RQ * C + r)
        rk = tl.load(row_values + ROW_RK * C + r)
    xg = gate_input_scalar(inputs.g, inputs.dt_bias, at, C)
    step = steps(xg, a_exp, lower_bound, r < rows, GATE, ASM)
    gc = tl.cumsum(step, 0)
    total = tl.min(gc, 0)
    decay = tl.exp2(tl.minimum(gc[:, None] - gc[None, :], 0.0))
    M1 *= decay
    M2 *= decay
    dstep = pair_steps(inputs.q, inputs.k, M1, M2, b, rq, rk, at, KP, BK, C, DOT)
    M1 = M1.to(dtype)
    M2 = M2.to(dtype)
    down = tl.exp2(gc)[:, None]
    rest = tl.exp2(total - gc)[:, None]
    from_start = tl.zeros([C], tl.float32)
    to_end = tl.zeros([C], tl.float32)
    dlast = 0.0

    for first in range(0, KP, BK):
        cols = first + tl.arange(0, BK)
        dqt = tl.zeros([C, BK], tl.float32)
        x = tl.zeros([C, BK], tl.float32)
        ci = tl.zeros([C, BK], tl.float32)
        both = tl.zeros([BK], tl.float32)
        for v0 in range(0, VP, BV):
            vs = v0 + tl.arange(0, BV)
            if VP > BV:
                dot, vt, dr = value_tiles(do, scanned.vT, scanned.drT, at, chunk, vs, VP, C)
            flat = chunk * (VP * KP) + vs[:, None] * KP + cols[None, :]
            ht = tl.load(scanned.hT + flat)
            dht = tl.load(scanned.dhT + flat)
            both += tl.sum(product(ht.to(tl.float32), dht.to(tl.float32)), 0)
            dqt = mma_acc(dot, ht, dqt, DOT)
            x = mma_acc(dr, ht, x, DOT)
            ci = mma_acc(tl.trans(vt), dht, ci, DOT)
        qt = load_rows(inputs.q, start, rows, H * K, h * K, cols, K, C).to(tl.float32) * rq[:, None]
        kt = load_rows(inputs.k, start, rows, H * K, h * K, cols, K, C).to(tl.float32) * rk[:, None]
        dqt *= scale * down
        x *= -down
        ci *= rest
        from_start += tl.sum(qt * dqt + b[:, None] * kt * x, 1)
        to_end += tl.sum(product(kt, ci), 1)
        dlast += tl.sum(both, 0)
        q_op = operand(qt, DOT)
        k_op = operand(kt, DOT)
        dqt = mma_acc(M1, k_op, dqt, DOT)
        x = mma_acc(M2, k_op, x, DOT)
        col = mma(tl.trans(M1), q_op, DOT)
        col = mma_acc(tl.trans(M2), operand(b[:, None] * kt, DOT), col, DOT) + ci
        dkt = b[:, None] * x + col
        db += tl.sum(product(kt, x), 1)
        dqt += diagonal * kt
        dkt += diagonal * qt
        if L2NORM and KP == BK:
            dqt -= qt * tl.sum(product(dqt, qt), 1)[:, None]
            dkt -= kt * tl.sum(product(dkt, kt), 1)[:, None]
            dqt *= rq[:, None]
            dkt *= rk[:, None]
        store_rows(grads.dq, dqt, start, rows, HV * K, hv * K, cols, K, C)
        store_rows(grads.dk, dkt, start, rows, HV * K, hv * K, cols, K, C)

    store_vector(grads.dbeta, beta_grad(db, raw_beta, BETA), start, rows, HV, hv, C)
    dstep += tl.cumsum(from_start, 0, reverse=True) + sum_before(to_end, C, DOT) + tl.exp2(total) * dlast
    differentiable = (r < rows) & has_gradient(step, DOT)
    kind: tl.constexpr = grads.dg.dtype.element_ty
    dx, da_row = gate_grads(dstep, xg, step, a_exp, lower_bound, differentiable, GATE, ASM, kind)
    store_vector(grads.dg, gate_grad_as(dx, GATE, kind), start, rows, HV, hv, C)
    if inputs.dt_bias is not None:
        tl.store(grads.dbias_part + pid, sum_bias(dx, 0, GATE))
    if inputs.A_log is not None:
        tl.store(grads.dA_part + pid, tl.sum(da_row, 0))
