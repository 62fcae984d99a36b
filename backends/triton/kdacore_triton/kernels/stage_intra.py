"""Stage ``kda_chunk_intra``, in two forms that share their second half.

*Sub-chunk*: every pair of rows on the matrix unit, level by level (anchors at the first row of each right half, as in
the dyadic prepare). The anchor rows are loaded, not gathered from registers, so no hardware is left out.

*Token-parallel*: pairs within blocks of SPAN rows by one program per token, with exact exponents and no products
thrown away; only pairs across blocks, and the inverse, are left to the matrix unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import chunk_of_slot, exp2, mma_acc, operand
from kdacore_triton.kernels.inverse import unit_lower_inverse


@triton.jit
def _sequence_start(cu_ptr, N, token):
    """First row of the packed sequence that a token lies in."""
    lo = 0
    hi = N - 1
    while lo < hi:
        mid = (lo + hi + 1) // 2
        if tl.load(cu_ptr + mid) <= token:
            lo = mid
        else:
            hi = mid - 1
    return tl.load(cu_ptr + lo).to(tl.int64)


@triton.jit(do_not_specialize=["T", "N", "H", "HV"])
def intra_token_kernel(
    q_ptr, k_ptr, gc_ptr, beta_ptr, cu_ptr, aqk_ptr, low_ptr, T, N, H, HV, scale,
    K: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    PACKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: tokens * blocks of BH value heads. Writes the token's row of its diagonal block of SPAN rows.

    ``aqk_ptr``: ``[tokens, HV, C]``, at the columns it belongs to. ``low_ptr``: ``[tokens, HV, SPAN]`` float32,
    ``beta k_i . (k_j 2^(gc_i - gc_j))``.
    """
    blocks = (HV + BH - 1) // BH
    token = (tl.program_id(0) // blocks).to(tl.int64)
    hv = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    h = hv // (HV // H)
    if PACKED:
        start = _sequence_start(cu_ptr, N, token)
    else:
        start = token // T * T
    place = (token - start) % C
    first = token - place % SPAN

    d = tl.arange(0, BK)
    inside = (hv < HV)[:, None] & (d < K)[None, :]
    qk_at = (h * K)[:, None] + d[None, :]
    gc_at = (hv * K)[:, None] + d[None, :]
    q = tl.load(q_ptr + token * H * K + qk_at, mask=inside, other=0.0).to(tl.float32) * scale
    k = tl.load(k_ptr + token * H * K + qk_at, mask=inside, other=0.0).to(tl.float32)
    gc = tl.load(gc_ptr + token * HV * K + gc_at, mask=inside, other=0.0)
    k *= tl.load(beta_ptr + token * HV + hv, mask=hv < HV, other=0.0).to(tl.float32)[:, None]
    aqk_ptr += (token * HV + hv) * C + place - place % SPAN
    low_ptr += (token * HV + hv) * SPAN
    for n in tl.range(0, (place % SPAN + 1).to(tl.int32)):
        other = first + n
        kj = tl.load(k_ptr + other * H * K + qk_at, mask=inside, other=0.0).to(tl.float32)
        gj = tl.load(gc_ptr + other * HV * K + gc_at, mask=inside, other=0.0)
        kj *= exp2(gc - gj, ASM)
        tl.store(aqk_ptr + n, tl.sum(q * kj, 1).to(aqk_ptr.dtype.element_ty), mask=hv < HV)
        tl.store(low_ptr + n, tl.sum(k * kj, 1), mask=hv < HV)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def intra_chunk_kernel(
    q_ptr, k_ptr, gc_ptr, beta_ptr, cu_ptr, low_ptr, aqk_ptr, akk_ptr, T, NT, N, H, HV, scale,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    FIRST: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: slots * HV. ``FIRST``: 0 for the whole job, else log2 of the SPAN that the token kernel has done."""
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
    qk_row = ((token * H + h) * K)[:, None]
    gc_row = ((token * HV + hv) * K)[:, None]
    beta = tl.load(beta_ptr + token * HV + hv, mask=inside, other=0.0).to(tl.float32)
    gap = i[:, None] ^ i[None, :]
    lower = (i[:, None] >= i[None, :]) & inside[:, None]
    square = ((token * HV + hv) * C)[:, None] + i[None, :]
    akk = tl.zeros([C, C], tl.float32)
    if FIRST > 0:
        done = lower & ((gap >> FIRST) == 0)
        aqk = tl.load(aqk_ptr + square, mask=done, other=0.0).to(tl.float32)
        SPAN: tl.constexpr = 1 << FIRST
        low_at = ((token * HV + hv) * SPAN)[:, None] + (i % SPAN)[None, :]
        low = tl.load(low_ptr + low_at, mask=done & (gap != 0), other=0.0)
    else:
        qk = tl.zeros([C], tl.float32)
        for d0 in tl.range(0, BK, BS):
            d = d0 + tl.arange(0, BS)
            whole = inside[:, None] & (d < K)[None, :]
            q = tl.load(q_ptr + qk_row + d[None, :], mask=whole, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + qk_row + d[None, :], mask=whole, other=0.0).to(tl.float32)
            qk += tl.sum(q * k, 1)
        aqk = tl.where(gap == 0, qk[:, None] * scale, 0.0)
        low = tl.zeros([C, C], tl.float32)

    for n in tl.range(FIRST, LEVELS):
        anchor = (i >> (n + 1) << (n + 1)) + (1 << n)
        anchor_row = (((start + anchor) * HV + hv) * K)[:, None]
        dqk = tl.zeros([C, C], tl.float32)
        dkk = tl.zeros([C, C], tl.float32)
        for d0 in tl.range(0, BK, BS):
            d = d0 + tl.arange(0, BS)
            real = (d < K)[None, :]
            whole = inside[:, None] & real
            gc = tl.load(gc_ptr + gc_row + d[None, :], mask=whole, other=0.0)
            at = tl.load(gc_ptr + anchor_row + d[None, :], mask=(anchor < rows)[:, None] & real, other=0.0)
            # Rows after the anchor decay from it, rows before it up to it: one sign serves both.
            e = exp2(-tl.abs(gc - at), ASM)
            q = tl.load(q_ptr + qk_row + d[None, :], mask=whole, other=0.0).to(tl.float32) * e
            k = tl.load(k_ptr + qk_row + d[None, :], mask=whole, other=0.0).to(tl.float32) * e
            kt = tl.trans(operand(k, DOT))
            dqk = mma_acc(operand(q, DOT), kt, dqk, DOT)
            dkk = mma_acc(operand(k, DOT), kt, dkk, DOT)
        keep = lower & ((gap >> n) == 1)
        aqk = tl.where(keep, dqk * scale, aqk)
        akk = tl.where(keep, dkk, akk)

    kind = aqk_ptr.dtype.element_ty
    tl.store(aqk_ptr + square, tl.where(lower, aqk, 0.0).to(kind), mask=inside[:, None])
    x = unit_lower_inverse(low + akk * beta[:, None], i, INV_DOT, LEVELS)
    tl.store(akk_ptr + square, tl.where(lower, x, 0.0).to(kind), mask=inside[:, None])
