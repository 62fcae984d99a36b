"""Few heads and many tokens: a sequence is cut in segments that run side by side instead of one after another.

Over a segment of ``SEGMENT`` tokens the state changes by an affine map, ``S -> M S + B``. Three launches:

1. ``chunk_forward_segment_maps``: M and B of every segment at once. Both come from the recurrence over
   the segment's chunks: M from the identity without values, B from zero with values, so M is only K
   more columns of the state.
2. ``chunk_forward_segment_starts``: the state at the start of every segment, in order, with one product
   per segment.
3. ``chunk_forward_scan``: every segment at once from its own state.

Segments start at multiples of SEGMENT from the start of a sequence, however long it is, so appending
tokens changes no bit of what came before. Segment j of packed sequence n owns slot
``cu_seqlens[n] // SEGMENT + n + j``, like chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    load_state,
    mma,
    mma_acc,
    operand,
    sequence_of_slot,
    sequence_span,
    state_cell,
)
from .groups import Records
from .state_rows import load_pool_state, pool_cell, rows_of_sequence


@triton.jit
def segment_of_slot(cu_seqlens, slot, N, NS, SEGMENT: tl.constexpr, PACKED: tl.constexpr):
    """The sequence of segment slot ``slot``, and which of its segments it is. ``NS``: segments of an unpacked one."""
    if PACKED:
        n = sequence_of_slot(cu_seqlens, N, slot, SEGMENT)
        j = slot - ((tl.load(cu_seqlens + n) // SEGMENT).to(tl.int32) + n)
    else:
        n = slot // NS
        j = slot - n * NS
    return n, j


@triton.jit
def store_map(map_, s, cell, mask, KP: tl.constexpr, DOT: tl.constexpr):
    """M in float32, or in the same bytes as two bfloat16 parts: the serial launch then converts nothing."""
    if DOT == "bf16":
        half = map_.to(tl.pointer_type(tl.bfloat16))
        hi = s.to(tl.bfloat16)
        tl.store(half + cell, hi, mask=mask)
        tl.store(half + KP * KP + cell, (s - hi.to(tl.float32)).to(tl.bfloat16), mask=mask)
    else:
        tl.store(map_ + cell, s, mask=mask)


@triton.jit
def apply_map(s, map_, b, cell, KP: tl.constexpr, DOT: tl.constexpr, FULL: tl.constexpr):
    """``s M^T + b`` to at least 16 bits."""
    if DOT == "bf16":
        half = map_.to(tl.pointer_type(tl.bfloat16))
        m = tl.load(half + cell)
        hi = s.to(tl.bfloat16)
        lo = (s - hi.to(tl.float32)).to(tl.bfloat16)
        r = tl.dot(hi, tl.load(half + KP * KP + cell), acc=b)
        r = tl.dot(lo, m, acc=r)
        r = tl.dot(hi, m, acc=r)
    else:
        r = mma_acc(s, tl.load(map_ + cell), b, FULL)
    return r


@triton.jit(
    do_not_specialize=["T", "NT", "HV", "N", "NS", "null"],
    do_not_specialize_on_alignment=["state_indices", "has_initial_state"],
)
def chunk_forward_segment_maps_kernel(
    records: Records, source, maps, cu_seqlens, state_indices, has_initial_state, T, NT, HV, N, NS,
    source_row, source_head, null,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SEGMENT: tl.constexpr, SCALAR_GATE: tl.constexpr, V_FIRST: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
    POOL: tl.constexpr, OF_SLICE: tl.constexpr = False,
):  # fmt: skip
    """Grid: segment slots * HV * (VP // BV + cdiv(KP, BV)). Writes ``[VP + KP, KP]`` a slot and head, transposed:
    B first, then M, with bfloat16 dots as the two halves of :func:`store_map`. The first segment has no M: its B
    already holds the initial state. The last has neither. ``POOL``: as in the scan.

    ``OF_SLICE``: of a slice of a row that several ranks share. What a sequence starts from is then not known: its first
    segment has M, and B from zero. The sequence that goes on behind the slice has both of its last segment."""
    COLUMNS: tl.constexpr = VP // BV
    BLOCKS: tl.constexpr = COLUMNS + (KP + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % BLOCKS
    slot = pid // BLOCKS // HV
    hv = (pid // BLOCKS - slot * HV).to(tl.int64)
    n, j = segment_of_slot(cu_seqlens, slot, N, NS, SEGMENT, PACKED)
    begin, length, first = sequence_span(cu_seqlens, n, T, NT, C, PACKED)
    is_map = block >= COLUMNS
    if OF_SLICE:
        goes_on = begin + length == T if PACKED else True
        if j * SEGMENT >= length or ((j + 1) * SEGMENT >= length and not goes_on):
            return
        chunks = tl.minimum(tl.cdiv(length - j * SEGMENT, C), SEGMENT // C)
    else:
        if (j + 1) * SEGMENT >= length or (is_map and j == 0):
            return
        chunks = SEGMENT // C
    i = tl.arange(0, C)
    d = tl.arange(0, KP)
    at = tl.arange(0, BV)
    vv = block * BV + at
    unit = (block - COLUMNS) * BV + at  # negative in the blocks of B
    s = tl.where(unit[:, None] == d[None, :], 1.0, 0.0)
    if source is not None:  # noqa: SIM102  (a constexpr test, then one of values)
        if j == 0:
            given = (vv < V)[:, None] & (d < K)[None, :]
            if POOL is not None:
                row, _ = rows_of_sequence(n, state_indices, has_initial_state, null)
                cell = pool_cell(d, vv, POOL.source_k, POOL.source_v, KP, VP)
                s = load_pool_state(source, row, source_row, hv, source_head, cell, given, vv, True)
            else:
                s = load_state(source, n, HV, hv, state_cell(d, vv, K, V, V_FIRST), given, K, V)
    krow = i[:, None] * KP + d[None, :]
    ucell = vv[:, None] * C + i[None, :]
    chunk = first + j * (SEGMENT // C)
    for c in tl.range(0, chunks, num_stages=STAGES):
        tile = (chunk + c).to(tl.int64) * HV + hv
        rec = records.tiles + tile * (C * (3 * KP + VP + C))
        w = tl.load(rec + krow)
        ut = tl.load(rec + 3 * C * KP + ucell, mask=(vv < VP)[:, None], other=0.0)
        kg = tl.load(rec + 2 * C * KP + krow)
        if SCALAR_GATE:
            decay = tl.load(records.decay + tile)
        else:
            decay = tl.load(records.decay + tile * KP + d)[None, :]
        r = operand(ut.to(tl.float32) - mma(operand(s, DOT), tl.trans(w), DOT), DOT)
        s = mma_acc(r, kg, s * decay, DOT)
    out = maps + (slot.to(tl.int64) * HV + hv) * ((VP + KP) * KP)
    if is_map:
        store_map(out + VP * KP, s, unit[:, None] * KP + d[None, :], (unit < KP)[:, None], KP, DOT)
    else:
        tl.store(out + vv[:, None] * KP + d[None, :], s)


@triton.jit(
    do_not_specialize=["T", "HV", "NS", "null"],
    do_not_specialize_on_alignment=["state_indices", "has_initial_state"],
)
def chunk_forward_segment_starts_kernel(
    maps, source, starts, cu_seqlens, state_indices, has_initial_state, T, HV, NS, source_row, source_head, null,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, SEGMENT: tl.constexpr,
    V_FIRST: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, FULL: tl.constexpr,
    POOL: tl.constexpr, OF_SLICE: tl.constexpr = False,
):  # fmt: skip
    """Grid: N * HV * (VP // BV). Writes the state each segment starts from: ``[VP, KP]`` a slot and head.
    ``POOL``: as in the scan. ``OF_SLICE``: as in the maps, which then do not hold the initial state."""
    pid = tl.program_id(0)
    v0 = (pid % (VP // BV)) * BV
    head = pid // (VP // BV)
    n = head // HV
    hv = (head - n * HV).to(tl.int64)
    _, length, slot = sequence_span(cu_seqlens, n, T, NS, SEGMENT, PACKED)
    d = tl.arange(0, KP)
    vv = v0 + tl.arange(0, BV)
    here = vv[:, None] * KP + d[None, :]
    square = tl.arange(0, KP)[:, None] * KP + d[None, :]
    if source is None:
        s = tl.zeros([BV, KP], tl.float32)
    else:
        real = (vv < V)[:, None] & (d < K)[None, :]
        if POOL is not None:
            row, _ = rows_of_sequence(n, state_indices, has_initial_state, null)
            cell = pool_cell(d, vv, POOL.source_k, POOL.source_v, KP, VP)
            s = load_pool_state(source, row, source_row, hv, source_head, cell, real, vv, True)
        else:
            s = load_state(source, n, HV, hv, state_cell(d, vv, K, V, V_FIRST), real, K, V)
    tile = slot.to(tl.int64) * HV + hv
    tl.store(starts + tile * (VP * KP) + here, s)
    segments = (length + SEGMENT - 1) // SEGMENT
    if not OF_SLICE:  # noqa: SIM102  (a constexpr test, then one of values)
        if segments > 1:
            s = tl.load(maps + tile * ((VP + KP) * KP) + here)
            tl.store(starts + (tile + HV) * (VP * KP) + here, s)
    FIRST: tl.constexpr = 0 if OF_SLICE else 1
    for j in tl.range(FIRST, segments - 1):
        map_ = maps + (tile + j * HV) * ((VP + KP) * KP)
        s = apply_map(s, map_ + VP * KP, tl.load(map_ + here), square, KP, DOT, FULL)
        tl.store(starts + (tile + (j + 1) * HV) * (VP * KP) + here, s)


@triton.jit(do_not_specialize=["T", "HV", "NS"], do_not_specialize_on_alignment=["leaving"])
def chunk_forward_slice_transition_kernel(
    maps, transition, end, cu_seqlens, leaving, T, HV, NS,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, SEGMENT: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The maps of a sequence's segments, one after another: M ``[G, HV, K, K]`` and C ``[G, HV, K, V]`` in float32, of
    the sequence ``leaving`` names, or of each that is not packed.

    Grid: G * HV * (VP + KP) // BV, of which each program has BV rows of C and M transposed. The maps are those of
    ``OF_SLICE``."""
    COLUMNS: tl.constexpr = VP // BV
    BLOCKS: tl.constexpr = (VP + KP) // BV
    pid = tl.program_id(0)
    block = pid % BLOCKS
    head = pid // BLOCKS
    n = head // HV
    hv = (head - n * HV).to(tl.int64)
    if PACKED:
        n = tl.load(leaving)
    _, length, slot = sequence_span(cu_seqlens, n, T, NS, SEGMENT, PACKED)
    is_map = block >= COLUMNS
    d = tl.arange(0, KP)
    row = block * BV + tl.arange(0, BV)
    unit = row - VP  # negative in the blocks of C
    here = row[:, None] * KP + d[None, :]
    square = tl.arange(0, KP)[:, None] * KP + d[None, :]
    added = (row < VP)[:, None] & (d >= 0)[None, :]
    s = tl.where(unit[:, None] == d[None, :], 1.0, 0.0)
    tile = slot.to(tl.int64) * HV + hv
    for j in tl.range(0, (length + SEGMENT - 1) // SEGMENT):
        map_ = maps + (tile + j * HV) * ((VP + KP) * KP)
        s = apply_map(s, map_ + VP * KP, tl.load(map_ + here, mask=added, other=0.0), square, KP, DOT, FULL)
    at = head.to(tl.int64)
    if is_map:
        real = (unit < K)[:, None] & (d < K)[None, :]
        tl.store(transition + at * (K * K) + d[None, :] * K + unit[:, None], s, mask=real)
    else:
        real = (row < V)[:, None] & (d < K)[None, :]
        tl.store(end + at * (K * V) + d[None, :] * V + row[:, None], s, mask=real)
