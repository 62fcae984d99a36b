"""Stage ``kda_recompute_w_u``: w, u, kg and qg of one chunk from the inverse Akk."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import chunk_of_slot, exp2, mma, mma_acc, operand
from .groups import RecomputeArrays, RecomputedArrays


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def recompute_kernel(
    inputs: RecomputeArrays, outputs: RecomputedArrays, T, NT, N, H, HV,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: slots * HV. ``inputs.q`` and ``outputs.qg`` may be None. Channels in blocks of BK."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = (pid - slot * HV).to(tl.int64)
    h = hv // (HV // H)
    start, rows = chunk_of_slot(inputs.cu_seqlens, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return
    i = tl.arange(0, C)
    inside = i < rows
    token = start + i
    row = token * HV + hv
    qk_row = ((token * H + h) * K)[:, None]
    beta = tl.load(inputs.beta + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    akk = tl.load(inputs.Akk + (row * C)[:, None] + i[None, :], mask=inside[:, None], other=0.0)
    akk = operand(akk.to(tl.float32), DOT)
    last = ((start + rows - 1) * HV + hv) * K
    kind = outputs.w.dtype.element_ty
    for d0 in tl.range(0, KP, BK):
        d = d0 + tl.arange(0, BK)
        whole = inside[:, None] & (d < K)[None, :]
        out = (row * K)[:, None] + d[None, :]
        gc = tl.load(inputs.gc + out, mask=whole, other=0.0)
        total = tl.load(inputs.gc + last + d, mask=d < K, other=0.0)
        k = tl.load(inputs.k + qk_row + d[None, :], mask=whole, other=0.0).to(tl.float32)
        e = exp2(gc, ASM)
        # Two parts: with near-collinear keys w is smaller than the rounding error of one part.
        decayed = k * e * beta
        head = operand(decayed, DOT)
        w = mma(akk, head, DOT)
        if DOT == "bf16" or DOT == "fp16":
            w = mma_acc(akk, operand(decayed - head.to(tl.float32), DOT), w, DOT)
        tl.store(outputs.w + out, w.to(kind), mask=whole)
        tl.store(outputs.kg + out, (k * exp2(total[None, :] - gc, ASM)).to(kind), mask=whole)
        if inputs.q is not None:
            q = tl.load(inputs.q + qk_row + d[None, :], mask=whole, other=0.0).to(tl.float32)
            tl.store(outputs.qg + out, (q * e).to(kind), mask=whole)
    for d0 in tl.range(0, VP, BK):
        d = d0 + tl.arange(0, BK)
        whole = inside[:, None] & (d < V)[None, :]
        out = (row * V)[:, None] + d[None, :]
        v = tl.load(inputs.v + out, mask=whole, other=0.0).to(tl.float32)
        tl.store(outputs.u + out, mma(akk, operand(v * beta, DOT), DOT).to(kind), mask=whole)
