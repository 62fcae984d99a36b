"""Stage ``kda_chunk_output``: the output of one chunk from its start state and v_new."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import blocks_before, chunk_of_slot, exp2, mma_acc, operand, sequence_of_slot
from .groups import ChunkOutputArrays


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def output_kernel(
    inputs: ChunkOutputArrays, o, T, NT, N, H, HV, scale,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: slots * HV, blocks of BV columns. Channels in blocks of BK."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = (pid - slot * HV).to(tl.int64)
    h = hv // (HV // H)
    start, rows = chunk_of_slot(inputs.cu_seqlens, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return
    if PACKED:
        n = sequence_of_slot(inputs.cu_seqlens, N, slot, C)
        first = (tl.load(inputs.cu_seqlens + n).to(tl.int64) // C).to(tl.int32) + n
        chunk = blocks_before(inputs.cu_seqlens, n, C, 128) + slot - first
    else:
        chunk = slot
    i = tl.arange(0, C)
    inside = i < rows
    token = start + i
    row = token * HV + hv
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    h_start = inputs.h + (chunk.to(tl.int64) * HV + hv) * (K * V)
    out = tl.zeros([C, BV], tl.float32)
    for d0 in tl.range(0, KP, BK):
        d = d0 + tl.arange(0, BK)
        whole = inside[:, None] & (d < K)[None, :]
        q = tl.load(inputs.q + ((token * H + h) * K)[:, None] + d[None, :], mask=whole, other=0.0).to(
            tl.float32
        )
        gc = tl.load(inputs.gc + (row * K)[:, None] + d[None, :], mask=whole, other=0.0)
        state = tl.load(
            h_start + d[:, None] * V + vv[None, :], mask=(d < K)[:, None] & (vv < V)[None, :], other=0.0
        )
        out = mma_acc(operand(q * exp2(gc, ASM), DOT), operand(state.to(tl.float32), DOT), out, DOT)
    out *= scale
    aqk = tl.load(inputs.Aqk + (row * C)[:, None] + i[None, :], mask=inside[:, None], other=0.0).to(
        tl.float32
    )
    cell = (row * V)[:, None] + vv[None, :]
    mask = inside[:, None] & (vv < V)[None, :]
    v = tl.load(inputs.v_new + cell, mask=mask, other=0.0).to(tl.float32)
    out = mma_acc(operand(aqk, DOT), operand(v, DOT), out, DOT)
    tl.store(o + cell, out.to(o.dtype.element_ty), mask=mask)
