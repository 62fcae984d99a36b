"""``prepare`` for one gate per head (gated delta rule): the decay between two rows is a plain matrix, no anchors."""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import chunk_of_slot, exp2, gate_decay, mma, operand
from kdacore_triton.kernels.inverse import unit_lower_inverse
from kdacore_triton.kernels.rows import load_beta, load_gate_rate, load_rows


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def prepare_scalar_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    cu_ptr,
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
    BC: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    INV_DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid: slots * HV. Same arguments as the bounded kernel; ``anchor`` and ``BC`` are not used. ``g`` is
    ``[tokens, HV]``, ``dt_bias`` ``[HV]``, ``decay`` one number per record."""
    pid = tl.program_id(0).to(tl.int64)
    slot = pid // HV
    hv = pid - slot * HV
    h = hv // (HV // H)
    start, rows = chunk_of_slot(cu_ptr, slot.to(tl.int32), N, T, NT, C, PACKED)
    if rows <= 0:
        return

    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    inside = i < rows
    token = start + i
    tile = slot * HV + hv
    rec = rec_ptr + tile * (C * (3 * BK + BV + C))
    kind = rec_ptr.dtype.element_ty
    out = i[:, None] * BK + d[None, :]

    x = tl.load(g_ptr + token * HV + hv, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + hv).to(tl.float32)
    g = tl.where(inside, gate_decay(x, load_gate_rate(a_log_ptr, hv), lower_bound, GATE, ASM), 0.0)
    gc = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    tl.store(decay_ptr + tile, tl.exp2(total))
    k = load_rows(k_ptr, token, inside, h, H, d, K, L2NORM)
    q = load_rows(q_ptr, token, inside, h, H, d, K, L2NORM) * scale
    beta = load_beta(beta_ptr, token, inside, hv, HV, BETA_SIGMOID, BETA_FACTOR)

    keep = i[:, None] >= i[None, :]
    ratio = tl.where(keep, exp2(tl.where(keep, gc[:, None] - gc[None, :], 0.0), ASM), 0.0)
    kt = tl.trans(operand(k, DOT))
    aqk = mma(operand(q, DOT), kt, DOT) * ratio
    tl.store(rec + C * (3 * BK + BV) + i[:, None] * C + i[None, :], aqk.to(kind))
    low = tl.where(i[:, None] > i[None, :], mma(operand(k, DOT), kt, DOT) * ratio * beta[:, None], 0.0)

    e_in = exp2(gc, ASM)
    tl.store(rec + out, (q * e_in[:, None]).to(kind))
    tl.store(rec + C * BK + out, (k * exp2(total - gc, ASM)[:, None]).to(kind))
    x_inv = operand(unit_lower_inverse(low, i, INV_DOT, C), DOT)
    w = mma(x_inv, operand(k * (e_in * beta)[:, None], DOT), DOT)
    tl.store(rec + 2 * C * BK + out, w.to(kind))
    for v0 in tl.range(0, BV, BU):
        c = v0 + tl.arange(0, BU)
        v = tl.load(
            v_ptr + (token * HV + hv)[:, None] * V + c[None, :],
            mask=inside[:, None] & (c < V)[None, :],
            other=0.0,
        )
        u = mma(x_inv, operand(v.to(tl.float32) * beta[:, None], DOT), DOT)
        tl.store(rec + 3 * C * BK + c[None, :] * C + i[:, None], u.to(kind))
