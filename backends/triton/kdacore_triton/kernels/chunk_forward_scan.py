"""Last launch of the chunk forward: the recurrence over the chunks of one sequence and value head, and the output.

Per chunk, with the rows of the record that the prepare kernel wrote::

    v' = ut^T - w S         o = qg S + Aqk v'         S <- diag(decay) S + kg^T v'

The state is kept transposed, ``[BV, KP]`` in float32 registers. There it is the left operand of every
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
from .groups import (
    ChosenCheckpoints,
    PoolStrides,
    RecordOffsets,
    Records,
    SequencePlace,
    StateArrays,
)
from .state_rows import load_pool_state, load_slot, pool_cell, row_mask, row_written, rows_of_sequence

NO_CHECKPOINT = tl.constexpr(2**62)
"""After the last key of :func:`next_checkpoint`."""


@triton.jit
def next_checkpoint(chosen, bos, length, last, C: tl.constexpr, WIDTH: tl.constexpr):
    """The lowest key above ``last`` of a sequence's checkpoints: ``chunk * count + i`` for the i-th, which is in that
    chunk of the sequence."""
    best = tl.full([], NO_CHECKPOINT, tl.int64)
    first = 0
    while first < chosen.count:
        i = first + tl.arange(0, WIDTH)
        token = tl.load(chosen.offsets + i, mask=i < chosen.count, other=-1).to(tl.int64) - bos
        row = tl.load(chosen.rows + i, mask=i < chosen.count, other=-1).to(tl.int64)
        if chosen.null is not None:
            row = tl.where(row == chosen.null, -1, row)
        key = token // C * chosen.count + i
        found = (row >= 0) & (token >= 0) & (token < length) & (key > last)
        best = tl.minimum(best, tl.min(tl.where(found, key, NO_CHECKPOINT), 0))
        first += WIDTH
    return best


@triton.jit
def scan_chunk(
    s, c, records, o, checkpoints, place, offsets, d, vv, i, cell, real,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SCALAR_GATE: tl.constexpr, EVERY: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Writes the output of chunk c, and the checkpoint at its start if there is one; returns the state at its end."""
    tile = (place.slot + c).to(tl.int64) * place.HV + place.hv
    if EVERY:  # noqa: SIM102  (a constexpr test: without checkpoints the next line must not be compiled)
        if (c * C) % EVERY == 0:
            at = ((place.block + (c * C) // EVERY) * place.HV + place.hv) * (K * V)
            tl.store(checkpoints + at + cell, s.to(checkpoints.dtype.element_ty), mask=real)
    rec = records.tiles + tile * (C * (3 * KP + VP + C))
    wq = tl.load(rec + offsets.w_and_qg)
    ut = tl.load(rec + 3 * C * KP + offsets.ut)
    aqk = tl.load(rec + C * (3 * KP + VP) + offsets.aqk)
    kg = tl.load(rec + 2 * C * KP + offsets.kg)
    if SCALAR_GATE:
        decay = tl.load(records.decay + tile)
    else:
        decay = tl.load(records.decay + tile * KP + d)[None, :]
    sb = operand(s, DOT)
    # One product for both: each product is waited for.
    both = tl.permute(tl.reshape(mma(sb, tl.trans(wq), DOT), [BV, 2, C]), [0, 2, 1])
    ws, out = tl.split(both)
    r = operand(ut.to(tl.float32) - ws, DOT)
    out = tl.fma(mma(r, tl.trans(aqk), DOT), 1.0, out)
    s = mma_acc(r, kg, s * decay, DOT)
    token = c * C + i
    mask = (vv < V)[:, None] & (token < place.length)[None, :]
    at = ((place.bos + token) * place.HV + place.hv)[None, :] * V + vv[:, None]
    tl.store(o + at, out.to(o.dtype.element_ty), mask=mask)
    return s


@triton.jit
def store_no_output(
    o, begin, end, bos, length, HV, hv, vv, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr
):
    """Zeros in place of the output of some chunks: those of a sequence that is padding."""
    i = tl.arange(0, C)
    for c in tl.range(begin, end, num_stages=1):
        token = c * C + i
        mask = (vv < V)[:, None] & (token < length)[None, :]
        at = ((bos + token) * HV + hv)[None, :] * V + vv[:, None]
        tl.store(o + at, tl.zeros([BV, C], o.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["T", "NT", "HV", "N", "NS", "checkpoint_count", "null"],
    do_not_specialize_on_alignment=[
        "state_indices", "has_initial_state", "write_indices", "checkpoint_offsets", "checkpoint_indices"
    ],
)  # fmt: skip
def chunk_forward_scan_kernel(
    records: Records, o, states: StateArrays, cu_seqlens, mids,
    state_indices, has_initial_state, write_indices, checkpoint_offsets, checkpoint_indices,
    T, NT, HV, N, NS, strides: PoolStrides, checkpoint_count, null,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SEGMENT: tl.constexpr, SCALAR_GATE: tl.constexpr, V_FIRST: tl.constexpr, PACKED: tl.constexpr,
    EVERY: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, POOL: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    """Grid: ``N * HV * VP // BV``, or with ``SEGMENT`` segment slots for N, each from its own state in
    ``states.starts``. ``EVERY``: tokens per checkpoint, 0 for none.

    ``POOL``, strides or None: with them ``states.source`` and ``states.target`` are read and written by rows;
    ``INPLACE``: the rows written are those of a pool. With checkpoints at ``checkpoint_offsets`` the state at the start
    of a chunk that holds one goes to its row ``checkpoint_indices`` of the target, or, where chunks have more rows than
    checkpoints can be apart, to ``mids`` ``[checkpoint_count, HV, VP, KP]``, for :mod:`.chunk_forward_checkpoints`.
    """
    MAYBE_PADDING: tl.constexpr = state_indices is not None
    MAYBE_NO_SOURCE: tl.constexpr = MAYBE_PADDING or has_initial_state is not None
    MAYBE_NO_TARGET: tl.constexpr = MAYBE_PADDING or write_indices is not None
    pid = tl.program_id(0)
    v0 = (pid % (VP // BV)) * BV
    head = pid // (VP // BV)
    n = head // HV
    hv = (head - n * HV).to(tl.int64)
    segment = n
    j = 0
    if SEGMENT:
        n, j = segment_of_slot(cu_seqlens, segment, N, NS, SEGMENT, PACKED)
    bos, length, slot = sequence_span(cu_seqlens, n, T, NT, C, PACKED)
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
    d = tl.arange(0, KP)
    vv = v0 + tl.arange(0, BV)
    real = (vv < V)[:, None] & (d < K)[None, :]
    cell = state_cell(d, vv, K, V, V_FIRST)
    whole = (n * HV + hv) * (K * V)
    if POOL is not None:
        source, own = rows_of_sequence(n, state_indices, has_initial_state, null)
    if SEGMENT:
        start = states.starts + (segment.to(tl.int64) * HV + hv) * (VP * KP)
        if POOL is not None and MAYBE_PADDING:
            here = row_mask(vv[:, None] >= 0, vv, own, True)
            s = tl.load(start + vv[:, None] * KP + d[None, :], mask=here, other=0.0)
        else:
            s = tl.load(start + vv[:, None] * KP + d[None, :])
    elif states.source is None:
        s = tl.zeros([BV, KP], tl.float32)
    elif POOL is not None:
        at = pool_cell(d, vv, POOL.source_k, POOL.source_v, KP, VP)
        s = load_pool_state(
            states.source, source, strides.source_row, hv, strides.source_head, at, real, vv, MAYBE_NO_SOURCE
        )
    else:
        s = load_state(states.source, n, HV, hv, cell, real, K, V)

    block = 0
    if EVERY:
        if PACKED:
            block = blocks_before(cu_seqlens, n, EVERY, 128).to(tl.int64)
        else:
            block = n.to(tl.int64) * ((T + EVERY - 1) // EVERY)
    if POOL is not None and MAYBE_PADDING:
        store_no_output(o, begin, tl.where(own < 0, end, begin), bos, length, HV, hv, vv, V, BV, C)
        end = tl.where(own < 0, begin, end)

    rows = tl.arange(0, 2 * C)[:, None] * KP + d[None, :]
    keys = i[:, None] * KP + d[None, :]
    square = i[:, None] * C + i[None, :]
    values = vv[:, None] * C + i[None, :]
    offsets = RecordOffsets(w_and_qg=rows, kg=keys, aqk=square, ut=values)
    place = SequencePlace(bos, length, slot, block, HV, hv)
    if checkpoint_offsets is None:
        for c in tl.range(begin, end, num_stages=STAGES):
            s = scan_chunk(
                s, c, records, o, states.checkpoints, place, offsets, d, vv, i, cell, real,
                K, V, KP, VP, BV, C, SCALAR_GATE, EVERY, DOT,
            )  # fmt: skip
    else:
        wide = begin + tl.zeros([], tl.int64)
        chosen = ChosenCheckpoints(checkpoint_offsets, checkpoint_indices, checkpoint_count, null)
        key = next_checkpoint(chosen, bos, length, wide * checkpoint_count - 1, C, 128)
        now = wide.to(tl.int32)
        while now < end:
            stop = tl.minimum(key // checkpoint_count, end).to(tl.int32)
            for c in tl.range(now, stop, num_stages=STAGES):
                s = scan_chunk(
                    s, c, records, o, states.checkpoints, place, offsets, d, vv, i, cell, real,
                    K, V, KP, VP, BV, C, SCALAR_GATE, EVERY, DOT,
                )  # fmt: skip
            if stop < end:
                nth = key - stop.to(tl.int64) * checkpoint_count
                if mids is None:
                    row = load_slot(checkpoint_indices + nth, null)
                    kept = row * strides.target_row + hv * strides.target_head
                    kept += pool_cell(d, vv, POOL.target_k, POOL.target_v, KP, VP)
                    tl.store(states.target + kept, s.to(states.target.dtype.element_ty), mask=real)
                else:
                    mid = (nth * HV + hv) * (VP * KP)
                    tl.store(mids + mid + vv[:, None] * KP + d[None, :], s)
                key = next_checkpoint(chosen, bos, length, key, C, 128)
            now = stop

    if states.target is not None:  # noqa: SIM102  (a constexpr test, then one of values)
        if SEGMENT == 0 or (j + 1) * SEGMENT >= length:
            if POOL is not None:
                goal = row_written(n, own, state_indices, write_indices, null, INPLACE)
                at = goal * strides.target_row + hv * strides.target_head
                at += pool_cell(d, vv, POOL.target_k, POOL.target_v, KP, VP)
                mask = row_mask(real, vv, goal, INPLACE and MAYBE_NO_TARGET)
                tl.store(states.target + at, s.to(states.target.dtype.element_ty), mask=mask)
            else:
                tl.store(states.target + whole + cell, s.to(states.target.dtype.element_ty), mask=real)
