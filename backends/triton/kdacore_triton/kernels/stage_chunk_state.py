"""Stage ``delta_rule_chunk_state``: the states at the chunks' starts and v_new, one chunk after another."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import blocks_before, exp2, load_state, mma, mma_acc, operand


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
