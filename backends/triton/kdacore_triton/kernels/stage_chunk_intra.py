"""Stage ``kda_chunk_intra``: pairs inside blocks of SPAN rows, in two forms, and the rest of the chunk for both.

*Token-parallel*: one program per token, exact exponents, causal loop bounds, no product computed in
vain. It writes the strictly lower blocks.

*Sub-chunk*: one warp per block, on the matrix unit, level by level. At each level the block is cut in
halves and exponents are relative to the first row of the second half, so that every factor is at most
1 with any gates and no later row changes a bit of an earlier one's. Reference rows are loaded rather
than gathered from registers, which works on all hardware. It writes the blocks' inverses.

The merge computes the pairs of rows in different blocks, level by level too, and the inverse of the
whole chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import MIN_STEP, at_least, chunk_of_slot, exp2, mma, mma_acc, operand
from .groups import IntraArrays
from .step_sums import step_operand, sum_steps
from .triangular_inverse import unit_lower_inverse

SPAN = tl.constexpr(16)
"""Rows of a diagonal block: the smallest chunk size."""


@triton.jit
def _sequence_start(cu_seqlens, N, token):
    """First row of the packed sequence that a token lies in."""
    lo = 0
    hi = N - 1
    while lo < hi:
        mid = (lo + hi + 1) // 2
        if tl.load(cu_seqlens + mid) <= token:
            lo = mid
        else:
            hi = mid - 1
    return tl.load(cu_seqlens + lo).to(tl.int64)


@triton.jit
def _load_tile(x, at, inside, d, K: tl.constexpr, KP: tl.constexpr, OTHER: tl.constexpr = 0.0):
    """Rows at offsets ``at`` over the channels ``d``, float32; OTHER outside."""
    if KP == K:
        tile = tl.load(x + at[:, None] + d[None, :], mask=inside[:, None], other=OTHER)
    else:
        tile = tl.load(x + at[:, None] + d[None, :], mask=inside[:, None] & (d < K)[None, :], other=OTHER)
    return tile.to(tl.float32)


@triton.jit(do_not_specialize=["T", "N", "H", "HV"])
def intra_token_kernel(
    inputs: IntraArrays, Aqk, diagonal, T, N, H, HV, scale,
    K: tl.constexpr, KP: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: tokens * blocks of BH value heads. Writes the token's row of its diagonal block of SPAN rows.

    ``Aqk``: ``[tokens, HV, C]``, at the columns it belongs to. ``diagonal``: ``[tokens, HV, SPAN]`` float32,
    ``beta k_i . (k_j 2^(gc_i - gc_j))`` below the diagonal; the rest is left as it is.
    """
    blocks = (HV + BH - 1) // BH
    token = (tl.program_id(0) // blocks).to(tl.int64)
    if PACKED:  # noqa: SIM102  (a constexpr test, then one of values)
        if token >= tl.load(inputs.cu_seqlens + N):  # behind the pack
            return
    hv = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    h = hv // (HV // H)
    if PACKED:
        start = _sequence_start(inputs.cu_seqlens, N, token)
    else:
        start = token // T * T
    place = ((token - start) % C).to(tl.int32)
    within = place % SPAN
    first = token - within

    d = tl.arange(0, KP)
    head = hv < HV
    inside = head[:, None] & (d < K)[None, :]
    qk_at = (h * K)[:, None] + d[None, :]
    gc_at = (hv * K)[:, None] + d[None, :]
    q = tl.load(inputs.q + token * H * K + qk_at, mask=inside, other=0.0).to(tl.float32) * scale
    k = tl.load(inputs.k + token * H * K + qk_at, mask=inside, other=0.0).to(tl.float32)
    gc = tl.load(inputs.gc + token * HV * K + gc_at, mask=inside, other=0.0)
    k *= tl.load(inputs.beta + token * HV + hv, mask=head, other=0.0).to(tl.float32)[:, None]
    Aqk += token * HV * C + place - within
    diagonal += token * HV * SPAN
    column = tl.arange(0, SPAN)
    unused = tl.zeros([BH, SPAN], Aqk.dtype.element_ty)
    tl.store(
        Aqk + (hv * C)[:, None] + column[None, :], unused, mask=head[:, None] & (column > within)[None, :]
    )
    k_row = inputs.k + first * H * K
    gc_row = inputs.gc + first * HV * K
    for n in tl.range(0, within + 1):
        kj = tl.load(k_row + qk_at, mask=inside, other=0.0).to(tl.float32)
        kj *= exp2(gc - tl.load(gc_row + gc_at, mask=inside, other=0.0), ASM)
        tl.store(Aqk + hv * C + n, tl.sum(q * kj, 1).to(Aqk.dtype.element_ty), mask=head)
        tl.store(diagonal + hv * SPAN + n, tl.sum(k * kj, 1), mask=head)
        k_row += H * K
        gc_row += HV * K


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def intra_diagonal_kernel(
    inputs: IntraArrays, levels, Aqk, diagonal, T, NT, N, H, HV, scale,
    K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: slots * (C / SPAN) * HV. Writes the block of Aqk, and the inverse to ``diagonal`` ``[tokens, HV, SPAN]``.

    ``levels``: 0/1 matrices ``[4, SPAN, SPAN]`` that choose the steps (columns) between a row and its reference
    row; float16 where the rows are 16-bit, else float32.
    """
    pid = tl.program_id(0)
    block = pid // HV
    hv = pid - block * HV
    h = hv // (HV // H)
    slot = block // (C // SPAN)
    row0 = (block - slot * (C // SPAN)) * SPAN
    start, rows = chunk_of_slot(inputs.cu_seqlens, slot, N, T, NT, C, PACKED)
    rows -= row0
    if rows <= 0:
        return
    start += row0
    i = tl.arange(0, SPAN)
    inside = i < rows
    q_rows = inputs.q + (start * H + h) * K
    k_rows = inputs.k + (start * H + h) * K
    gc_rows = inputs.gc + (start * HV + hv) * K
    qk_at = i * (H * K)
    gc_at = i * (HV * K)
    beta = tl.load(inputs.beta + start * HV + hv + i * HV, mask=inside, other=0.0).to(tl.float32)
    gap = i[:, None] ^ i[None, :]
    aqk = tl.zeros([SPAN, SPAN], tl.float32)
    akk = tl.zeros([SPAN, SPAN], tl.float32)
    for d0 in tl.range(0, KP, BK):
        d = d0 + tl.arange(0, BK)
        # Steps, not running sums: any run of them is summed on the matrix unit. No run takes the first row's.
        steps = _load_tile(gc_rows, gc_at, inside, d, K, KP)
        steps -= _load_tile(gc_rows, gc_at - HV * K, inside & (i > 0), d, K, KP)
        steps = step_operand(at_least(steps, MIN_STEP), DOT)  # float16 holds it
        q = _load_tile(q_rows, qk_at, inside, d, K, KP)
        k = _load_tile(k_rows, qk_at, inside, d, K, KP)
        aqk += tl.where(gap == 0, mma(operand(q, DOT), tl.trans(operand(k, DOT)), DOT), 0.0)
        for n in tl.static_range(0, 4):
            take = tl.load(levels + n * (SPAN * SPAN) + i[:, None] * SPAN + i[None, :])
            e = exp2(sum_steps(take, steps, DOT), ASM)
            kk = operand(k * e, DOT)
            keep = (gap >> n) == 1
            aqk += tl.where(keep, mma(operand(q * e, DOT), tl.trans(kk), DOT), 0.0)
            akk += tl.where(keep, mma(kk, tl.trans(kk), DOT), 0.0)
    lower = i[:, None] >= i[None, :]
    out = Aqk + (start * HV + hv) * C + row0
    aqk = tl.where(lower, aqk * scale, 0.0).to(Aqk.dtype.element_ty)
    tl.store(out + (i * (HV * C))[:, None] + i[None, :], aqk, mask=inside[:, None])
    low = tl.where(i[:, None] > i[None, :], akk * beta[:, None], 0.0)
    inverse = unit_lower_inverse(low, i, INV_DOT, 4)
    out = diagonal + (start * HV + hv) * SPAN + (i * (HV * SPAN))[:, None] + i[None, :]
    tl.store(out, tl.where(lower, inverse, 0.0).to(diagonal.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _load_block(q_rows, k_rows, gc_rows, row, rows, d, H, HV, K: tl.constexpr, KP: tl.constexpr):
    """SPAN rows of q, k and gc, float32. Rows past the end have q = k = 0 and nothing left of any decay."""
    r = tl.arange(0, SPAN) + row
    inside = r < rows
    q = _load_tile(q_rows, r * (H * K), inside, d, K, KP)
    k = _load_tile(k_rows, r * (H * K), inside, d, K, KP)
    return q, k, _load_tile(gc_rows, r * (HV * K), inside, d, K, KP, float("-inf"))


@triton.jit
def _from(x, e, DOT: tl.constexpr):
    """Rows decayed by the factors ``e``, as a left operand."""
    return operand(x * e, DOT)


@triton.jit
def _upto(k, exponent, DOT: tl.constexpr, ASM: tl.constexpr):
    """Keys decayed up to their reference row, as a right operand. Rows past the end would grow: they get no factor."""
    return tl.trans(operand(k * exp2(tl.minimum(exponent, 0.0), ASM), DOT))


@triton.jit
def _store_block(square, x, row, column, rows, stride, S: tl.constexpr):
    """``x [S, S]`` at a row and column of a chunk's square."""
    i = tl.arange(0, S)
    r = i + row
    at = square + (r * stride)[:, None] + (i + column)[None, :]
    tl.store(at, x.to(square.dtype.element_ty), mask=(r < rows)[:, None])


@triton.jit
def _load_rates(beta, row, rows, stride):
    """beta of SPAN rows as a float32 column, zero past the end."""
    r = tl.arange(0, SPAN) + row
    return tl.load(beta + r * stride, mask=r < rows, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _load_inverse(diagonal, row, rows, stride, INVERTED: tl.constexpr, INV_DOT: tl.constexpr):
    """The inverse of the diagonal block at ``row``: read, or made from the strictly lower part."""
    i = tl.arange(0, SPAN)
    r = i + row
    at = diagonal + (r * stride)[:, None] + i[None, :]
    inside = (r < rows)[:, None]
    if INVERTED:
        x = tl.load(at, mask=inside, other=0.0)
    else:
        low = tl.load(at, mask=inside & (i[:, None] > i[None, :]), other=0.0)
        x = unit_lower_inverse(low, i, INV_DOT, 4)
    return x


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def intra_merge_kernel(
    inputs: IntraArrays, diagonal, Aqk, Akk, T, NT, N, H, HV, scale,
    K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, INVERTED: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: slots * HV. ``diagonal``: ``[tokens, HV, SPAN]`` float32, inverses of the blocks if INVERTED."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = pid - slot * HV
    h = hv // (HV // H)
    start, rows = chunk_of_slot(inputs.cu_seqlens, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return
    q_rows = inputs.q + (start * H + h) * K
    k_rows = inputs.k + (start * H + h) * K
    gc_rows = inputs.gc + (start * HV + hv) * K
    beta = inputs.beta + (start * HV + hv)
    diagonal += (start * HV + hv) * SPAN
    Aqk += (start * HV + hv) * C
    Akk += (start * HV + hv) * C
    stride = HV * C
    if C > SPAN:
        i = tl.arange(0, C)
        above = (i // SPAN)[:, None] < (i // SPAN)[None, :]
        above = above & (i < rows)[:, None]
        none = tl.zeros([C, C], Aqk.dtype.element_ty)
        tl.store(Aqk + (i * stride)[:, None] + i[None, :], none, mask=above)
        tl.store(Akk + (i * stride)[:, None] + i[None, :], none, mask=above)

    # Where rows of the second half are missing, the last row is the reference: results are finite and never stored.
    reference1 = tl.minimum(SPAN, rows - 1) * HV * K
    reference2 = tl.minimum(2 * SPAN, rows - 1) * HV * K
    reference3 = tl.minimum(3 * SPAN, rows - 1) * HV * K
    qk10 = tl.zeros([SPAN, SPAN], tl.float32)
    kk10 = tl.zeros([SPAN, SPAN], tl.float32)
    qk20 = tl.zeros([SPAN, SPAN], tl.float32)
    kk20 = tl.zeros([SPAN, SPAN], tl.float32)
    qk21 = tl.zeros([SPAN, SPAN], tl.float32)
    kk21 = tl.zeros([SPAN, SPAN], tl.float32)
    qk30 = tl.zeros([SPAN, SPAN], tl.float32)
    kk30 = tl.zeros([SPAN, SPAN], tl.float32)
    qk31 = tl.zeros([SPAN, SPAN], tl.float32)
    kk31 = tl.zeros([SPAN, SPAN], tl.float32)
    qk32 = tl.zeros([SPAN, SPAN], tl.float32)
    kk32 = tl.zeros([SPAN, SPAN], tl.float32)
    if C > SPAN:
        for d0 in tl.range(0, KP, BK):
            d = d0 + tl.arange(0, BK)
            _, k0, g0 = _load_block(q_rows, k_rows, gc_rows, 0, rows, d, H, HV, K, KP)
            q1, k1, g1 = _load_block(q_rows, k_rows, gc_rows, SPAN, rows, d, H, HV, K, KP)
            a1 = tl.load(gc_rows + reference1 + d, mask=d < K, other=0.0)[None, :]
            e = exp2(g1 - a1, ASM)
            right = _upto(k0, a1 - g0, DOT, ASM)
            qk10 = mma_acc(_from(q1, e, DOT), right, qk10, DOT)
            kk10 = mma_acc(_from(k1, e, DOT), right, kk10, DOT)
            if C == 64:
                q2, k2, g2 = _load_block(q_rows, k_rows, gc_rows, 2 * SPAN, rows, d, H, HV, K, KP)
                q3, k3, g3 = _load_block(q_rows, k_rows, gc_rows, 3 * SPAN, rows, d, H, HV, K, KP)
                a2 = tl.load(gc_rows + reference2 + d, mask=d < K, other=0.0)[None, :]
                a3 = tl.load(gc_rows + reference3 + d, mask=d < K, other=0.0)[None, :]
                e = exp2(g3 - a3, ASM)
                right = _upto(k2, a3 - g2, DOT, ASM)
                qk32 = mma_acc(_from(q3, e, DOT), right, qk32, DOT)
                kk32 = mma_acc(_from(k3, e, DOT), right, kk32, DOT)
                e = exp2(g2 - a2, ASM)
                q2, k2 = _from(q2, e, DOT), _from(k2, e, DOT)
                e = exp2(g3 - a2, ASM)
                q3, k3 = _from(q3, e, DOT), _from(k3, e, DOT)
                right = _upto(k0, a2 - g0, DOT, ASM)
                qk20 = mma_acc(q2, right, qk20, DOT)
                kk20 = mma_acc(k2, right, kk20, DOT)
                qk30 = mma_acc(q3, right, qk30, DOT)
                kk30 = mma_acc(k3, right, kk30, DOT)
                right = _upto(k1, a2 - g1, DOT, ASM)
                qk21 = mma_acc(q2, right, qk21, DOT)
                kk21 = mma_acc(k2, right, kk21, DOT)
                qk31 = mma_acc(q3, right, qk31, DOT)
                kk31 = mma_acc(k3, right, kk31, DOT)

    x0 = _load_inverse(diagonal, 0, rows, HV * SPAN, INVERTED, INV_DOT)
    _store_block(Akk, x0, 0, 0, rows, stride, SPAN)
    if C > SPAN:
        b1 = _load_rates(beta, SPAN, rows, HV)
        x1 = _load_inverse(diagonal, SPAN, rows, HV * SPAN, INVERTED, INV_DOT)
        y0 = -mma(mma(x1, kk10 * b1, INV_DOT), x0, INV_DOT)
        _store_block(Aqk, qk10 * scale, SPAN, 0, rows, stride, SPAN)
        _store_block(Akk, x1, SPAN, SPAN, rows, stride, SPAN)
        _store_block(Akk, y0, SPAN, 0, rows, stride, SPAN)
        if C == 64:
            b2 = _load_rates(beta, 2 * SPAN, rows, HV)
            b3 = _load_rates(beta, 3 * SPAN, rows, HV)
            _store_block(Aqk, qk20 * scale, 2 * SPAN, 0, rows, stride, SPAN)
            _store_block(Aqk, qk21 * scale, 2 * SPAN, SPAN, rows, stride, SPAN)
            _store_block(Aqk, qk30 * scale, 3 * SPAN, 0, rows, stride, SPAN)
            _store_block(Aqk, qk31 * scale, 3 * SPAN, SPAN, rows, stride, SPAN)
            _store_block(Aqk, qk32 * scale, 3 * SPAN, 2 * SPAN, rows, stride, SPAN)
            x2 = _load_inverse(diagonal, 2 * SPAN, rows, HV * SPAN, INVERTED, INV_DOT)
            x3 = _load_inverse(diagonal, 3 * SPAN, rows, HV * SPAN, INVERTED, INV_DOT)
            y1 = -mma(mma(x3, kk32 * b3, INV_DOT), x2, INV_DOT)
            _store_block(Akk, x2, 2 * SPAN, 2 * SPAN, rows, stride, SPAN)
            _store_block(Akk, x3, 3 * SPAN, 3 * SPAN, rows, stride, SPAN)
            _store_block(Akk, y1, 3 * SPAN, 2 * SPAN, rows, stride, SPAN)
            # The lower left half is -[[x2, 0], [y1, x3]] @ [[kk20, kk21], [kk30, kk31]] @ [[x0, 0], [y0, x1]].
            kk21 *= b2
            kk31 *= b3
            left = mma_acc(kk21, y0, mma(kk20 * b2, x0, INV_DOT), INV_DOT)
            right = mma(kk21, x1, INV_DOT)
            _store_block(Akk, -mma(x2, left, INV_DOT), 2 * SPAN, 0, rows, stride, SPAN)
            _store_block(Akk, -mma(x2, right, INV_DOT), 2 * SPAN, SPAN, rows, stride, SPAN)
            below = mma_acc(kk31, y0, mma(kk30 * b3, x0, INV_DOT), INV_DOT)
            below = mma_acc(x3, below, mma(y1, left, INV_DOT), INV_DOT)
            _store_block(Akk, -below, 3 * SPAN, 0, rows, stride, SPAN)
            below = mma_acc(x3, mma(kk31, x1, INV_DOT), mma(y1, right, INV_DOT), INV_DOT)
            _store_block(Akk, -below, 3 * SPAN, SPAN, rows, stride, SPAN)
