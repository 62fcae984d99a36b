"""Stage ``kda_chunk_output``: the output of one chunk from its start state and v_new."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import blocks_before, chunk_of_slot, exp2, mma_acc, operand, sequence_of_slot


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
