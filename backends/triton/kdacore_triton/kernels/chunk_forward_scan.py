"""Last launch of the chunk forward: the recurrence over the chunks of one sequence and value head, and the output.

Per chunk, with the rows of the record that the prepare kernel wrote::

    v' = ut^T - w S         o = qg S + Aqk v'         S <- diag(decay) S + kg^T v'

The state is kept transposed, ``[BV, BK]`` in float32 registers. There it is the left operand of every
product, as is the new value block, and neither passes through shared memory between two chunks.

With ``POOL`` states are read from and written to rows of pools, as :mod:`.state_rows` says. With checkpoints at chosen
tokens the loop over chunks stops where one is to be kept: what runs between two stops is the same loop.
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
from .state_rows import load_pool_state, load_slot, pool_cell, row_mask, row_written, rows_of_sequence

NO_CHECKPOINT = tl.constexpr(2**62)
"""After the last key of :func:`next_checkpoint`."""


@triton.jit
def next_checkpoint(offsets, rows, count, null, bos, length, last, C: tl.constexpr, WIDTH: tl.constexpr):
    """The lowest key above ``last`` of a sequence's checkpoints: ``chunk * count + i`` for the i-th, which is in that
    chunk of the sequence."""
    best = tl.full([], NO_CHECKPOINT, tl.int64)
    first = 0
    while first < count:
        i = first + tl.arange(0, WIDTH)
        token = tl.load(offsets + i, mask=i < count, other=-1).to(tl.int64) - bos
        row = tl.load(rows + i, mask=i < count, other=-1).to(tl.int64)
        if null is not None:
            row = tl.where(row == null, -1, row)
        key = token // C * count + i
        found = (row >= 0) & (token >= 0) & (token < length) & (key > last)
        best = tl.minimum(best, tl.min(tl.where(found, key, NO_CHECKPOINT), 0))
        first += WIDTH
    return best


@triton.jit
def scan_chunk(
    s, c, rec_ptr, decay_ptr, o_ptr, ckpt_ptr, slot, block, bos, length, HV, hv, d, vv, i, cell, real,
    row, krow, square, ucell,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BVP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SCALAR: tl.constexpr, EVERY: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Writes the output of chunk c, and the checkpoint at its start if there is one; returns the state at its end."""
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
    return s


@triton.jit
def store_no_output(
    o_ptr, begin, end, bos, length, HV, hv, vv, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr
):
    """Zeros in place of the output of some chunks: those of a sequence that is padding."""
    i = tl.arange(0, C)
    for c in tl.range(begin, end, num_stages=1):
        token = c * C + i
        mask = (vv < V)[:, None] & (token < length)[None, :]
        at = ((bos + token) * HV + hv)[None, :] * V + vv[:, None]
        tl.store(o_ptr + at, tl.zeros([BV, C], o_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["T", "NT", "HV", "N", "NS", "count", "null"],
    do_not_specialize_on_alignment=["indices_ptr", "filled_ptr", "goals_ptr", "offsets_ptr", "kept_ptr"],
)
def chunk_forward_scan_kernel(
    rec_ptr,
    decay_ptr,
    o_ptr,
    s0_ptr,
    starts_ptr,
    st_ptr,
    ckpt_ptr,
    cu_ptr,
    mids_ptr,
    indices_ptr,
    filled_ptr,
    goals_ptr,
    offsets_ptr,
    kept_ptr,
    T,
    NT,
    HV,
    N,
    NS,
    source_row,
    source_h,
    target_row,
    target_h,
    count,
    null,
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
    POOL: tl.constexpr,
    INPLACE: tl.constexpr,
    SOURCE_K: tl.constexpr,
    SOURCE_V: tl.constexpr,
    TARGET_K: tl.constexpr,
    TARGET_V: tl.constexpr,
):
    """Grid: ``N * HV * BVP // BV``, or with ``SEGMENT`` segment slots for N, each from its own state in
    ``starts_ptr``. ``BVP``: V padded, as prepare laid out ``ut``. ``EVERY``: tokens per checkpoint, 0 for none.

    ``POOL``: ``s0_ptr`` and ``st_ptr`` are read and written by rows, with strides ``source_row``, ``source_h``,
    ``SOURCE_K``, ``SOURCE_V`` and the same of the target; ``INPLACE``: the rows written are those of a pool. With
    ``count`` checkpoints at ``offsets_ptr`` the state at the start of a chunk that holds one goes to its row
    ``kept_ptr`` of the target, or, where chunks have more rows than checkpoints can be apart, to ``mids_ptr``
    ``[count, HV, BVP, BK]``, for :mod:`.chunk_forward_checkpoints`.
    """
    MAYBE_PADDING: tl.constexpr = indices_ptr is not None
    MAYBE_NO_SOURCE: tl.constexpr = MAYBE_PADDING or filled_ptr is not None
    MAYBE_NO_TARGET: tl.constexpr = MAYBE_PADDING or goals_ptr is not None
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
    if POOL:
        source, own = rows_of_sequence(n, indices_ptr, filled_ptr, null)
    if SEGMENT:
        start = starts_ptr + (segment.to(tl.int64) * HV + hv) * (BVP * BK)
        if POOL and MAYBE_PADDING:
            here = row_mask(vv[:, None] >= 0, vv, own, True)
            s = tl.load(start + vv[:, None] * BK + d[None, :], mask=here, other=0.0)
        else:
            s = tl.load(start + vv[:, None] * BK + d[None, :])
    elif s0_ptr is None:
        s = tl.zeros([BV, BK], tl.float32)
    elif POOL:
        at = pool_cell(d, vv, SOURCE_K, SOURCE_V, BK, BVP)
        s = load_pool_state(s0_ptr, source, source_row, hv, source_h, at, real, vv, MAYBE_NO_SOURCE)
    else:
        s = load_state(s0_ptr, n, HV, hv, cell, real, K, V)

    block = 0
    if EVERY:
        if PACKED:
            block = blocks_before(cu_ptr, n, EVERY, 128).to(tl.int64)
        else:
            block = n.to(tl.int64) * ((T + EVERY - 1) // EVERY)
    if POOL and MAYBE_PADDING:
        store_no_output(o_ptr, begin, tl.where(own < 0, end, begin), bos, length, HV, hv, vv, V, BV, C)
        end = tl.where(own < 0, begin, end)

    row = tl.arange(0, 2 * C)[:, None] * BK + d[None, :]
    krow = i[:, None] * BK + d[None, :]
    square = i[:, None] * C + i[None, :]
    ucell = vv[:, None] * C + i[None, :]
    if offsets_ptr is None:
        for c in tl.range(begin, end, num_stages=STAGES):
            s = scan_chunk(
                s, c, rec_ptr, decay_ptr, o_ptr, ckpt_ptr, slot, block, bos, length, HV, hv, d, vv, i, cell, real,
                row, krow, square, ucell, K, V, BK, BVP, BV, C, SCALAR, EVERY, DOT,
            )  # fmt: skip
    else:
        wide = begin + tl.zeros([], tl.int64)
        key = next_checkpoint(offsets_ptr, kept_ptr, count, null, bos, length, wide * count - 1, C, 128)
        now = wide.to(tl.int32)
        while now < end:
            stop = tl.minimum(key // count, end).to(tl.int32)
            for c in tl.range(now, stop, num_stages=STAGES):
                s = scan_chunk(
                    s, c, rec_ptr, decay_ptr, o_ptr, ckpt_ptr, slot, block, bos, length, HV, hv, d, vv, i, cell,
                    real, row, krow, square, ucell, K, V, BK, BVP, BV, C, SCALAR, EVERY, DOT,
                )  # fmt: skip
            if stop < end:
                nth = key - stop.to(tl.int64) * count
                if mids_ptr is None:
                    kept = load_slot(kept_ptr + nth, null) * target_row + hv * target_h
                    kept += pool_cell(d, vv, TARGET_K, TARGET_V, BK, BVP)
                    tl.store(st_ptr + kept, s.to(st_ptr.dtype.element_ty), mask=real)
                else:
                    mid = (nth * HV + hv) * (BVP * BK)
                    tl.store(mids_ptr + mid + vv[:, None] * BK + d[None, :], s)
                key = next_checkpoint(offsets_ptr, kept_ptr, count, null, bos, length, key, C, 128)
            now = stop

    if st_ptr is not None:  # noqa: SIM102  (a constexpr test, then one of values)
        if SEGMENT == 0 or (j + 1) * SEGMENT >= length:
            if POOL:
                goal = row_written(n, own, indices_ptr, goals_ptr, null, INPLACE)
                at = goal * target_row + hv * target_h + pool_cell(d, vv, TARGET_K, TARGET_V, BK, BVP)
                mask = row_mask(real, vv, goal, INPLACE and MAYBE_NO_TARGET)
                tl.store(st_ptr + at, s.to(st_ptr.dtype.element_ty), mask=mask)
            else:
                tl.store(st_ptr + whole + cell, s.to(st_ptr.dtype.element_ty), mask=real)
