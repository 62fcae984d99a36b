"""One launch for all the work of a chunk that does not depend on the state.

One program per (chunk, value head): gate and running sums, l2norm, the two intra-chunk matrices, the triangular
inverse, and the rows that the scan multiplies with the state. What it writes is in :mod:`kdacore_triton.forward`.

All loads come first: what limits this kernel is their latency.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import GATE_LOG, chunk_of_slot, mma, operand, rnorm
from kdacore_triton.kernels.inverse import unit_lower_inverse
from kdacore_triton.kernels.prepare_heads import bounded_head, dyadic_head, scalar_head
from kdacore_triton.kernels.rows import load_beta, load_gate_bias, load_gate_rate

BOUNDED = tl.constexpr(0)
DYADIC = tl.constexpr(1)
SCALAR = tl.constexpr(2)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def prepare_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    cu_ptr,
    levels_ptr,
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
    LEVELS: tl.constexpr,
    FAMILY: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    INV_DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid: slots * HV. ``BU``: channels of v a block; ``C = 2^LEVELS``. ``anchor`` (BOUNDED): an
    integer near half of C steps at the bound, in log2. With SCALAR, g is ``[tokens, HV]``, dt_bias ``[HV]`` and decay
    one number per record."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = (pid - slot * HV).to(tl.int64)
    h = hv // (HV // H)
    start, rows = chunk_of_slot(cu_ptr, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return

    i = tl.arange(0, C)
    inside = i < rows
    token = start + i
    tile = pid.to(tl.int64)
    rec = rec_ptr + tile * (C * (3 * BK + BV + C))
    kind = rec_ptr.dtype.element_ty
    d = tl.arange(0, BK)
    whole = inside[:, None] & (d < K)[None, :]
    # What the gate turns into no decay at all needs no mask afterwards.
    NONE: tl.constexpr = 0.0 if GATE == GATE_LOG else float("-inf")
    if FAMILY == SCALAR:
        g = tl.load(g_ptr + token * HV + hv, mask=inside, other=NONE).to(tl.float32)
    else:
        g = tl.load(g_ptr + ((token * HV + hv) * K)[:, None] + d[None, :], mask=whole, other=NONE).to(
            tl.float32
        )
    qk_at = ((token * H + h) * K)[:, None] + d[None, :]
    k = tl.load(k_ptr + qk_at, mask=whole, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + qk_at, mask=whole, other=0.0).to(tl.float32)
    beta = load_beta(beta_ptr, token, inside, hv, HV, BETA_SIGMOID, BETA_FACTOR)
    u = tl.arange(0, BU)
    v_at = v_ptr + ((token * HV + hv) * V)[:, None] + u[None, :]
    v = tl.load(v_at, mask=inside[:, None] & (u < V)[None, :], other=0.0)

    a_exp = load_gate_rate(a_log_ptr, hv)
    if L2NORM:
        k *= rnorm(k, 1)[:, None]
        q *= (rnorm(q, 1) * scale)[:, None]
    else:
        q *= scale
    if FAMILY == SCALAR:
        bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + hv).to(tl.float32)
        aqk, akk, kw = scalar_head(
            q, k, g, bias, a_exp, lower_bound, beta, rec, decay_ptr + tile, BK, C, GATE, DOT, ASM
        )
    else:
        bias = load_gate_bias(bias_ptr, hv, d, K, BK)
        if FAMILY == BOUNDED:
            aqk, akk, kw = bounded_head(
                q,
                k,
                g,
                bias,
                a_exp,
                lower_bound,
                beta,
                rec,
                decay_ptr + tile * BK,
                anchor,
                BK,
                C,
                GATE,
                DOT,
                ASM,
            )
        else:
            aqk, akk, kw = dyadic_head(
                q, k, g, bias, a_exp, lower_bound, beta, rec, decay_ptr + tile * BK, levels_ptr,
                BK, C, LEVELS, GATE, DOT, ASM,
            )  # fmt: skip

    aqk = tl.where(i[:, None] >= i[None, :], aqk, 0.0)
    tl.store(rec + C * (3 * BK + BV) + i[:, None] * C + i[None, :], aqk.to(kind))
    low = tl.where(i[:, None] > i[None, :], akk * beta[:, None], 0.0)
    inverse = unit_lower_inverse(low, i, INV_DOT, LEVELS)
    by_beta = operand(inverse * beta[None, :], DOT)
    inverse = operand(inverse, DOT)

    w = mma(inverse, kw, DOT)
    tl.store(rec + 2 * C * BK + i[:, None] * BK + d[None, :], w.to(kind))

    for c0 in tl.static_range(0, BV, BU):
        if c0 > 0:
            v = tl.load(v_at + c0, mask=inside[:, None] & (c0 + u < V)[None, :], other=0.0)
        ut = mma(by_beta, operand(v, DOT), DOT)
        tl.store(rec + 3 * C * BK + (c0 + u)[None, :] * C + i[:, None], ut.to(kind))
