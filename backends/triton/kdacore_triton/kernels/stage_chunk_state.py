"""Stage ``delta_rule_chunk_state``: the states at the chunks' starts and v_new, one chunk after another."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import blocks_before, exp2, load_state, mma, mma_acc, operand
from .groups import ChunkStateArrays


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def state_kernel(
    inputs: ChunkStateArrays, h, v_new, final_state, T, NT, HV,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    V_FIRST: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of BV columns, N * HV. The state is kept transposed, ``[BV, KP]``, as in the fused scan."""
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    n = tl.program_id(0) // HV
    hv = (tl.program_id(0) - n * HV).to(tl.int64)
    if PACKED:
        bos = tl.load(inputs.cu_seqlens + n).to(tl.int64)
        length = (tl.load(inputs.cu_seqlens + n + 1).to(tl.int64) - bos).to(tl.int32)
        chunk = blocks_before(inputs.cu_seqlens, n, C, 128)
    else:
        bos = n.to(tl.int64) * T
        length = T
        chunk = n * NT
    i = tl.arange(0, C)
    d = tl.arange(0, KP)
    real = (vv < V)[:, None] & (d < K)[None, :]
    kv = d[None, :] * V + vv[:, None]
    if V_FIRST:
        cell = vv[:, None] * K + d[None, :]
    else:
        cell = kv
    whole = (n * HV + hv) * (K * V)
    s = tl.zeros([BV, KP], tl.float32)
    if inputs.initial_state is not None:
        s = load_state(inputs.initial_state, n, HV, hv, cell, real, K, V)
    for c in tl.range(0, (length + C - 1) // C):
        tl.store(
            h + ((chunk + c).to(tl.int64) * HV + hv) * (K * V) + kv,
            s.to(h.dtype.element_ty),
            mask=real,
        )
        inside = c * C + i < length
        row = (bos + c * C + i) * HV + hv
        k_at = (row * K)[:, None] + d[None, :]
        k_in = inside[:, None] & (d < K)[None, :]
        v_at = (row * V)[None, :] + vv[:, None]
        v_in = inside[None, :] & (vv < V)[:, None]
        w = operand(tl.load(inputs.w + k_at, mask=k_in, other=0.0).to(tl.float32), DOT)
        kg = operand(tl.load(inputs.kg + k_at, mask=k_in, other=0.0).to(tl.float32), DOT)
        u = tl.load(inputs.u + v_at, mask=v_in, other=0.0).to(tl.float32)
        final = tl.minimum(c * C + C, length) - 1
        total = tl.load(inputs.gc + ((bos + final) * HV + hv) * K + d, mask=d < K, other=0.0)
        r = u - mma(operand(s, DOT), tl.trans(w), DOT)
        tl.store(v_new + v_at, r.to(v_new.dtype.element_ty), mask=v_in)
        s = mma_acc(operand(r, DOT), kg, s * exp2(total, ASM)[None, :], DOT)
    tl.store(final_state + whole + cell, s.to(final_state.dtype.element_ty), mask=real)
