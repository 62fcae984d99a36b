"""The recurrence token by token: gate, norms, sigmoid and state update of every token in one launch.

One program owns ``BV`` columns of one sequence-head's state and keeps them in registers over all tokens, so the state
crosses memory once each way whatever T is. Programs never share a state element, which makes in-place pools safe.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import log2_decay, rnorm, sigmoid

READ_NONE = tl.constexpr(0)
"""The state starts at zero."""
READ_SEQUENCE = tl.constexpr(1)
"""Sequence n starts from row n."""
READ_INDEXED = tl.constexpr(2)
"""Sequence n starts from row ``indices[n]``, from zero when negative."""
READ_ACCEPTED = tl.constexpr(3)
"""Sequence n starts from row ``indices[n, accepted[n] - 1]``, from zero when either is negative."""

WRITE_NONE = tl.constexpr(0)
WRITE_SEQUENCE = tl.constexpr(1)
"""The final state goes to row n."""
WRITE_INDEXED = tl.constexpr(2)
"""The final state goes to row ``indices[n]``; nowhere when negative."""
WRITE_EACH = tl.constexpr(3)
"""The state after token t goes to row ``indices[n, t]``; nowhere when negative."""


@triton.jit
def positive(i, n):
    """``n > 0`` as a block shaped like ``i``. Triton 3.6 to 3.9 interpret a broadcast scalar comparison as integers."""
    return i * 0 + n > 0


@triton.jit
def load_token(q, k, v, g, beta, ik, iv, mk, mv, left, SCALAR: tl.constexpr, MASKED: tl.constexpr):
    """One token's raw inputs for one head; zero where masked, and everywhere when no token is ``left``."""
    if MASKED:
        mk = mk & positive(ik, left)
        xq = tl.load(q + ik, mask=mk, other=0.0)
        xk = tl.load(k + ik, mask=mk, other=0.0)
        xv = tl.load(v + iv, mask=mv & positive(iv, left), other=0.0)
        xb = tl.load(beta, mask=left > 0, other=0.0)
        if SCALAR:
            xg = tl.load(g, mask=left > 0, other=0.0)
        else:
            xg = tl.load(g + ik, mask=mk, other=0.0)
    else:
        xq = tl.load(q + ik)
        xk = tl.load(k + ik)
        xv = tl.load(v + iv)
        xb = tl.load(beta)
        if SCALAR:
            xg = tl.load(g)
        else:
            xg = tl.load(g + ik)
    return xq, xk, xv, xg, xb


@triton.jit
def advance(
    S, xq, xk, xv, xg, xb, bias, a_exp, scale, lower_bound,
    GATE: tl.constexpr, SCALAR: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, BETA_MAX: tl.constexpr,
):  # fmt: skip
    """One token: the new state ``S [BK, BV]`` and the output ``[BV]``, float32."""
    q = xq.to(tl.float32)
    k = xk.to(tl.float32)
    beta = xb.to(tl.float32)
    if NORM:
        q *= rnorm(q, 0)
        k *= rnorm(k, 0)
    q *= scale
    if SIGMOID:
        beta = BETA_MAX * sigmoid(beta)
    decay = tl.exp2(log2_decay(xg.to(tl.float32) + bias, a_exp, lower_bound, GATE))
    if SCALAR:
        S = S * decay
    else:
        S = S * decay[:, None]
    # Both products of the decayed state at once; q @ (S + k delta) is q @ S + (q . k) delta.
    delta = beta * (xv.to(tl.float32) - tl.sum(S * k[:, None], 0))
    o = tl.sum(S * q[:, None], 0) + tl.sum(q * k, 0) * delta
    return S + k[:, None] * delta[None, :], o


@triton.jit
def store_state(p, S, mask, MASKED: tl.constexpr):
    """Write the tile, rounded to the state's dtype."""
    if MASKED:
        tl.store(p, S.to(p.dtype.element_ty), mask=mask)
    else:
        tl.store(p, S.to(p.dtype.element_ty))


@triton.jit(
    do_not_specialize=["T", "HV", "GROUP", "beta_b", "beta_t", "beta_h", "index_row"],
    do_not_specialize_on_alignment=["beta", "A_log", "cu_seqlens", "indices", "accepted"],
)
def recurrent_kernel(
    q, k, v, g, o, dt_bias, source, target, beta, A_log, cu_seqlens, indices, accepted,
    scale, lower_bound,
    T, HV, GROUP,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h,
    source_row, source_h, target_row, target_h, index_row,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SOURCE_K: tl.constexpr, SOURCE_V: tl.constexpr, TARGET_K: tl.constexpr, TARGET_V: tl.constexpr,
    GATE: tl.constexpr, SCALAR: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr, BETA_MAX: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, PACKED: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Grid: (N * HV * ceil(V / BV), 1, 1), the blocks of one state next to each other.

    ``x_b, x_t, x_h`` are strides over batch, token and head, the last dimension being contiguous; ``source`` and
    ``target`` are the state read and written, with strides ``_row``, ``_h`` and constants ``_K``, ``_V``. ``GROUP``
    value heads share one query/key head. ``ONE``: exactly one token per sequence, not packed.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    EVEN_K: tl.constexpr = BK == K
    EVEN_V: tl.constexpr = V % BV == 0
    pid = tl.program_id(0)
    block = pid % NV
    hv = (pid // NV) % HV
    n = ((pid // NV) // HV).to(tl.int64)
    h = (hv // GROUP).to(tl.int64)
    ik = tl.arange(0, BK)
    iv = block * BV + tl.arange(0, BV)
    mk = ik < K
    mv = iv < V

    row = n
    if READ == READ_INDEXED or WRITE == WRITE_INDEXED:
        row = tl.load(indices + n).to(tl.int64)
    if READ == READ_ACCEPTED:
        count = tl.load(accepted + n).to(tl.int64)
        row = tl.load(indices + n * index_row + count - 1, mask=count > 0, other=-1).to(tl.int64)

    if PACKED:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - first).to(tl.int32)
        batch = n * 0
    else:
        first = n * 0
        length = T
        batch = n
    hv = hv.to(tl.int64)
    q += batch * q_b + first * q_t + h * q_h
    k += batch * k_b + first * k_t + h * k_h
    v += batch * v_b + first * v_t + hv * v_h
    g += batch * g_b + first * g_t + hv * g_h
    beta += batch * beta_b + first * beta_t + hv * beta_h
    o += batch * o_b + first * o_t + hv * o_h

    # The first token's loads go out before the state's, whose addresses may wait for an index.
    MASK_FIRST: tl.constexpr = PACKED or not EVEN_K or not EVEN_V
    xq, xk, xv, xg, xb = load_token(q, k, v, g, beta, ik, iv, mk, mv, length, SCALAR, MASK_FIRST)

    # Wide offsets only where the caller's own strides need them.
    if SOURCE_K * BK + SOURCE_V * (V + BV) < 2**31 and TARGET_K * BK + TARGET_V * (V + BV) < 2**31:
        jk = ik[:, None]
        jv = iv[None, :]
    else:
        jk = ik[:, None].to(tl.int64)
        jv = iv[None, :].to(tl.int64)
    MASK_STATE: tl.constexpr = not EVEN_K or not EVEN_V
    ms = mk[:, None] & mv[None, :]
    if READ == READ_NONE:
        S = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        p = source + row * source_row + hv * source_h + jk * SOURCE_K + jv * SOURCE_V
        if READ == READ_SEQUENCE:
            if MASK_STATE:
                S = tl.load(p, mask=ms, other=0.0).to(tl.float32)
            else:
                S = tl.load(p).to(tl.float32)
        elif MASK_STATE:
            S = tl.load(p, mask=ms & positive(jk, row + 1), other=0.0).to(tl.float32)
        else:
            S = tl.load(p, mask=positive(jk, row + 1), other=0.0).to(tl.float32)
    out_offset = hv * target_h + jk * TARGET_K + jv * TARGET_V

    bias = 0.0
    if dt_bias is not None:
        if SCALAR:
            bias = tl.load(dt_bias + hv).to(tl.float32)
        else:
            bias = tl.load(dt_bias + hv * K + ik, mask=mk, other=0.0).to(tl.float32)
    a_exp = 1.0
    if A_log is not None:
        a_exp = tl.exp(tl.load(A_log + hv).to(tl.float32))

    if ONE:
        S, y = advance(
            S, xq, xk, xv, xg, xb, bias, a_exp, scale, lower_bound, GATE, SCALAR, NORM, SIGMOID, BETA_MAX
        )
        if EVEN_V:
            tl.store(o + iv, y.to(o.dtype.element_ty))
        else:
            tl.store(o + iv, y.to(o.dtype.element_ty), mask=mv)
        if WRITE == WRITE_EACH:
            row = tl.load(indices + n * index_row).to(tl.int64)
            if row >= 0:
                store_state(target + row * target_row + out_offset, S, ms, MASK_STATE)
    else:
        for t in range(length):
            q += q_t
            k += k_t
            v += v_t
            g += g_t
            beta += beta_t
            left = length - t - 1
            nq, nk, nv, ng, nb = load_token(q, k, v, g, beta, ik, iv, mk, mv, left, SCALAR, True)
            S, y = advance(
                S, xq, xk, xv, xg, xb, bias, a_exp, scale, lower_bound, GATE, SCALAR, NORM, SIGMOID, BETA_MAX
            )
            tl.store(o + iv, y.to(o.dtype.element_ty), mask=mv)
            o += o_t
            if WRITE == WRITE_EACH:
                row = tl.load(indices + n * index_row + t).to(tl.int64)
                if row >= 0:
                    store_state(target + row * target_row + out_offset, S, ms, MASK_STATE)
            xq, xk, xv, xg, xb = nq, nk, nv, ng, nb

    if WRITE == WRITE_SEQUENCE:
        store_state(target + n * target_row + out_offset, S, ms, MASK_STATE)
    if WRITE == WRITE_INDEXED:  # noqa: SIM102 - a compile-time question: it stays apart from the next
        if row >= 0:
            store_state(target + row * target_row + out_offset, S, ms, MASK_STATE)
