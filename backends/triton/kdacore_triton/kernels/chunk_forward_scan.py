"""Last launch of the chunk forward: the recurrence over the chunks of one sequence and value head, and the output.

Per chunk, with the rows of the record that the prepare kernel wrote::

    v' = ut^T - w S         o = qg S + Aqk v'         S <- diag(decay) S + kg^T v'

The state is kept transposed, ``[BV, BK]`` in float32 registers. There it is the left operand of every
product, as is the new value block, and neither passes through shared memory between two chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_forward_segments import segment_of_slot
from .common import (
    blocks_before,
    load_state,
    mma,
    mma_acc,
    operand,
    sequence_span,
    state_cell,
)


@triton.jit(do_not_specialize=["T", "NT", "HV", "N", "NS"])
def chunk_forward_scan_kernel(
    rec_ptr,
    decay_ptr,
    o_ptr,
    s0_ptr,
    starts_ptr,
    st_ptr,
    ckpt_ptr,
    cu_ptr,
    T,
    NT,
    HV,
    N,
    NS,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BVP: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    SCALAR: tl.constexpr,
    V_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    EVERY: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: ``N * HV * BVP // BV``, or with ``SEGMENT`` segment slots for N, each from its own state in
    ``starts_ptr``. ``BVP``: V padded, as prepare laid out ``ut``. ``EVERY``: tokens per checkpoint, 0 for none."""
    pid = tl.program_id(0)
    v0 = (pid % (BVP // BV)) * BV
    head = pid // (BVP // BV)
    n = head // HV
    hv = (head - n * HV).to(tl.int64)
    segment = n
    j = 0
    if SEGMENT:
        n, j = segment_of_slot(cu_ptr, segment, N, NS, SEGMENT, PACKED)
    bos, length, slot = sequence_span(cu_ptr, n, T, NT, C, PACKED)
    chunks = (length + C - 1) // C
    if SEGMENT:
        begin = j * (SEGMENT // C)
        end = tl.minimum(begin + SEGMENT // C, chunks)
        if begin >= tl.maximum(chunks, 1):  # no such segment
            return
    else:
        begin = 0
        end = chunks

    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    vv = v0 + tl.arange(0, BV)
    real = (vv < V)[:, None] & (d < K)[None, :]
    cell = state_cell(d, vv, K, V, V_FIRST)
    whole = (n * HV + hv) * (K * V)
    if SEGMENT:
        start = starts_ptr + (segment.to(tl.int64) * HV + hv) * (BVP * BK)
        s = tl.load(start + vv[:, None] * BK + d[None, :])
    elif s0_ptr is None:
        s = tl.zeros([BV, BK], tl.float32)
    else:
        s = load_state(s0_ptr, n, HV, hv, cell, real, K, V)

    if EVERY:
        if PACKED:
            block = blocks_before(cu_ptr, n, EVERY, 128).to(tl.int64)
        else:
            block = n.to(tl.int64) * ((T + EVERY - 1) // EVERY)

    row = tl.arange(0, 2 * C)[:, None] * BK + d[None, :]
    krow = i[:, None] * BK + d[None, :]
    square = i[:, None] * C + i[None, :]
    ucell = vv[:, None] * C + i[None, :]
    for c in tl.range(begin, end, num_stages=STAGES):
        tile = (slot + c).to(tl.int64) * HV + hv
        if EVERY:  # noqa: SIM102  (a constexpr test: without checkpoints the next line must not be compiled)
            if (c * C) % EVERY == 0:
                at = ((block + (c * C) // EVERY) * HV + hv) * (K * V)
                tl.store(ckpt_ptr + at + cell, s.to(ckpt_ptr.dtype.element_ty), mask=real)
        rec = rec_ptr + tile * (C * (3 * BK + BVP + C))
        wq = tl.load(rec + row)
        ut = tl.load(rec + 3 * C * BK + ucell)
        aqk = tl.load(rec + C * (3 * BK + BVP) + square)
        kg = tl.load(rec + 2 * C * BK + krow)
        if SCALAR:
            decay = tl.load(decay_ptr + tile)
        else:
            decay = tl.load(decay_ptr + tile * BK + d)[None, :]
        sb = operand(s, DOT)
        # One product for both: each product is waited for.
        both = tl.permute(tl.reshape(mma(sb, tl.trans(wq), DOT), [BV, 2, C]), [0, 2, 1])
        ws, o = tl.split(both)
        r = operand(ut.to(tl.float32) - ws, DOT)
        o = tl.fma(mma(r, tl.trans(aqk), DOT), 1.0, o)
        s = mma_acc(r, kg, s * decay, DOT)
        token = c * C + i
        mask = (vv < V)[:, None] & (token < length)[None, :]
        at = ((bos + token) * HV + hv)[None, :] * V + vv[:, None]
        tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=mask)

    if st_ptr is not None:  # noqa: SIM102  (a constexpr test, then one of values)
        if SEGMENT == 0 or (j + 1) * SEGMENT >= length:
            tl.store(st_ptr + whole + cell, s.to(st_ptr.dtype.element_ty), mask=real)
