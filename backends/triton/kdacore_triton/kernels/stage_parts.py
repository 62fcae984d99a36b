"""Stages ``kda_recompute_w_u``, ``delta_rule_chunk_state`` and ``kda_chunk_output``."""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import (
    blocks_before,
    chunk_of_slot,
    exp2,
    load_state,
    mma,
    mma_acc,
    operand,
    sequence_of_slot,
)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def recompute_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, gc_ptr, akk_ptr, cu_ptr, w_ptr, u_ptr, kg_ptr, qg_ptr, T, NT, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: slots * HV. ``q_ptr`` and ``qg_ptr`` may be None. Channels in blocks of BS."""
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
    row = token * HV + hv
    qk_row = ((token * H + h) * K)[:, None]
    beta = tl.load(beta_ptr + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    akk = tl.load(akk_ptr + (row * C)[:, None] + i[None, :], mask=inside[:, None], other=0.0)
    akk = operand(akk.to(tl.float32), DOT)
    last = ((start + rows - 1) * HV + hv) * K
    kind = w_ptr.dtype.element_ty
    for d0 in tl.range(0, BK, BS):
        d = d0 + tl.arange(0, BS)
        whole = inside[:, None] & (d < K)[None, :]
        out = (row * K)[:, None] + d[None, :]
        gc = tl.load(gc_ptr + out, mask=whole, other=0.0)
        total = tl.load(gc_ptr + last + d, mask=d < K, other=0.0)
        k = tl.load(k_ptr + qk_row + d[None, :], mask=whole, other=0.0).to(tl.float32)
        e = exp2(gc, ASM)
        # Two parts: near-collinear keys leave of w less than the rounding of one.
        decayed = k * e * beta
        head = operand(decayed, DOT)
        w = mma(akk, head, DOT)
        if DOT == "bf16" or DOT == "fp16":
            w = mma_acc(akk, operand(decayed - head.to(tl.float32), DOT), w, DOT)
        tl.store(w_ptr + out, w.to(kind), mask=whole)
        tl.store(kg_ptr + out, (k * exp2(total[None, :] - gc, ASM)).to(kind), mask=whole)
        if q_ptr is not None:
            q = tl.load(q_ptr + qk_row + d[None, :], mask=whole, other=0.0).to(tl.float32)
            tl.store(qg_ptr + out, (q * e).to(kind), mask=whole)
    for d0 in tl.range(0, BV, BS):
        d = d0 + tl.arange(0, BS)
        whole = inside[:, None] & (d < V)[None, :]
        out = (row * V)[:, None] + d[None, :]
        v = tl.load(v_ptr + out, mask=whole, other=0.0).to(tl.float32)
        tl.store(u_ptr + out, mma(akk, operand(v * beta, DOT), DOT).to(kind), mask=whole)


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def state_kernel(
    kg_ptr, w_ptr, u_ptr, gc_ptr, s0_ptr, cu_ptr, h_ptr, vnew_ptr, st_ptr, T, NT, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    V_FIRST: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of BV columns, N * HV. The state is kept transposed, ``[BV, BK]``, as in the fused scan."""
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    n = tl.program_id(0) // HV
    hv = (tl.program_id(0) - n * HV).to(tl.int64)
    if PACKED:
        bos = tl.load(cu_ptr + n).to(tl.int64)
        length = (tl.load(cu_ptr + n + 1).to(tl.int64) - bos).to(tl.int32)
        chunk = blocks_before(cu_ptr, n, C, 128)
    else:
        bos = n.to(tl.int64) * T
        length = T
        chunk = n * NT
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    real = (vv < V)[:, None] & (d < K)[None, :]
    kv = d[None, :] * V + vv[:, None]
    if V_FIRST:
        cell = vv[:, None] * K + d[None, :]
    else:
        cell = kv
    whole = (n * HV + hv) * (K * V)
    s = tl.zeros([BV, BK], tl.float32)
    if s0_ptr is not None:
        s = load_state(s0_ptr, n, HV, hv, cell, real, K, V)
    for c in tl.range(0, (length + C - 1) // C):
        tl.store(
            h_ptr + ((chunk + c).to(tl.int64) * HV + hv) * (K * V) + kv,
            s.to(h_ptr.dtype.element_ty),
            mask=real,
        )
        inside = c * C + i < length
        row = (bos + c * C + i) * HV + hv
        k_at = (row * K)[:, None] + d[None, :]
        k_in = inside[:, None] & (d < K)[None, :]
        v_at = (row * V)[None, :] + vv[:, None]
        v_in = inside[None, :] & (vv < V)[:, None]
        w = operand(tl.load(w_ptr + k_at, mask=k_in, other=0.0).to(tl.float32), DOT)
        kg = operand(tl.load(kg_ptr + k_at, mask=k_in, other=0.0).to(tl.float32), DOT)
        u = tl.load(u_ptr + v_at, mask=v_in, other=0.0).to(tl.float32)
        final = tl.minimum(c * C + C, length) - 1
        total = tl.load(gc_ptr + ((bos + final) * HV + hv) * K + d, mask=d < K, other=0.0)
        r = u - mma(operand(s, DOT), tl.trans(w), DOT)
        tl.store(vnew_ptr + v_at, r.to(vnew_ptr.dtype.element_ty), mask=v_in)
        s = mma_acc(operand(r, DOT), kg, s * exp2(total, ASM)[None, :], DOT)
    tl.store(st_ptr + whole + cell, s.to(st_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def output_kernel(
    q_ptr, vnew_ptr, gc_ptr, aqk_ptr, h_ptr, cu_ptr, o_ptr, T, NT, N, H, HV, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BS: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: slots * HV, blocks of BV columns. Channels in blocks of BS."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = (pid - slot * HV).to(tl.int64)
    h = hv // (HV // H)
    start, rows = chunk_of_slot(cu_ptr, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return
    if PACKED:
        n = sequence_of_slot(cu_ptr, N, slot, C)
        first = (tl.load(cu_ptr + n).to(tl.int64) // C).to(tl.int32) + n
        chunk = blocks_before(cu_ptr, n, C, 128) + slot - first
    else:
        chunk = slot
    i = tl.arange(0, C)
    inside = i < rows
    token = start + i
    row = token * HV + hv
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    h_ptr += (chunk.to(tl.int64) * HV + hv) * (K * V)
    o = tl.zeros([C, BV], tl.float32)
    for d0 in tl.range(0, BK, BS):
        d = d0 + tl.arange(0, BS)
        whole = inside[:, None] & (d < K)[None, :]
        q = tl.load(q_ptr + ((token * H + h) * K)[:, None] + d[None, :], mask=whole, other=0.0).to(tl.float32)
        gc = tl.load(gc_ptr + (row * K)[:, None] + d[None, :], mask=whole, other=0.0)
        state = tl.load(
            h_ptr + d[:, None] * V + vv[None, :], mask=(d < K)[:, None] & (vv < V)[None, :], other=0.0
        )
        o = mma_acc(operand(q * exp2(gc, ASM), DOT), operand(state.to(tl.float32), DOT), o, DOT)
    o *= scale
    aqk = tl.load(aqk_ptr + (row * C)[:, None] + i[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    out = (row * V)[:, None] + vv[None, :]
    mask = inside[:, None] & (vv < V)[None, :]
    v = tl.load(vnew_ptr + out, mask=mask, other=0.0).to(tl.float32)
    o = mma_acc(operand(aqk, DOT), operand(v, DOT), o, DOT)
    tl.store(o_ptr + out, o.to(o_ptr.dtype.element_ty), mask=mask)
