"""Stage ``kda_recompute_w_u``: w, u, kg and qg of one chunk from the inverse Akk."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import chunk_of_slot, exp2, mma, mma_acc, operand


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
        # Two parts: with near-collinear keys w is smaller than the rounding error of one part.
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
