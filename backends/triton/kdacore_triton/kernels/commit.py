"""``commit_records``: records applied to states without tokens, and the convolution's windows that belong to them."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import positive, rounded
from .decode import record_row, target_tile
from .groups import (
    CandidateRecords,
    CandidateRecordStrides,
    CommittedStates,
    ConvolutionArrays,
    ConvolutionStrides,
    PoolStrides,
)
from .records import replayed
from .recurrent import load_state, store_state
from .state_rows import load_slot


@triton.jit(
    do_not_specialize=["HV", "null"],
    do_not_specialize_on_alignment=["state_indices", "write_indices", "record_indices", "num_replayed"],
)
def commit_kernel(
    states: CommittedStates, records: CandidateRecords,
    state_indices, write_indices, record_indices, num_replayed,
    HV, strides: PoolStrides, record_strides: CandidateRecordStrides, null,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, POOL: tl.constexpr,
    SCALAR_GATE: tl.constexpr, FLAT: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(V / BV) * HV, N, 1), or (ceil(V / BV) * HV * N, 1, 1) when ``FLAT``. A program owns a tile."""
    PARTS: tl.constexpr = (V + BV - 1) // BV
    MASKED: tl.constexpr = KP != K or V % BV != 0
    KIND: tl.constexpr = states.target.dtype.element_ty
    pid = tl.program_id(0)
    if FLAT:
        n = (pid // (PARTS * HV)).to(tl.int64)
        pid = pid % (PARTS * HV)
    else:
        n = tl.program_id(1).to(tl.int64)
    hv = (pid // PARTS).to(tl.int64)
    ik = tl.arange(0, KP)
    iv = (pid % PARTS) * BV + tl.arange(0, BV)
    mk = ik < K
    mv = iv < V

    own = load_slot(state_indices + n, null)
    row, count = record_row(n, own, record_indices, num_replayed, record_strides.tokens, null)
    goal = own
    if write_indices is not None:
        goal = load_slot(write_indices + n, null)
    goal = tl.where((row < 0) | ((count == 0) & (goal == own)), -1, goal)

    jk = ik[:, None]
    jv = iv[None, :]
    if (POOL.source_k + POOL.target_k) * KP + (POOL.source_v + POOL.target_v) * (V + BV) >= 2**31:
        jk = jk.to(tl.int64)
        jv = jv.to(tl.int64)
    head = states.source + own * strides.source_row + hv * strides.source_head
    S = load_state(
        head + (jk * POOL.source_k + jv * POOL.source_v), jk, mk[:, None], mv[None, :], goal, True, MASKED
    )
    S = replayed(
        S.to(tl.float32), records, record_strides, row, count, hv // GROUP, hv, ik, iv, mk, mv, SCALAR_GATE
    )
    p = target_tile(states, strides, goal, hv, jk, jv, POOL)
    store_state(p, rounded(S, KIND, BY_HAND), jk, mk[:, None], mv[None, :], goal, True, MASKED)


@triton.jit(
    do_not_specialize=["D", "null"],
    do_not_specialize_on_alignment=["state_indices", "conv_indices", "record_indices", "num_replayed"],
)
def commit_windows_kernel(
    conv: ConvolutionArrays,
    state_indices, conv_indices, record_indices, num_replayed,
    D, record_tokens, strides: ConvolutionStrides, null,
    HISTORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (N, ceil(D / BLOCK), 1). A program owns channels of a row and moves their columns to the left, or takes
    the ``HISTORY`` columns of a window where there are windows."""
    n = tl.program_id(0).to(tl.int64)
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    own = load_slot(state_indices + n, null)
    record, count = record_row(n, own, record_indices, num_replayed, record_tokens, null)
    row = own
    if conv_indices is not None:
        row = load_slot(conv_indices + n, null)
    there = (c < D) & positive(c, tl.minimum(tl.minimum(row, record) + 1, count))
    last = count - 1
    at = conv.conv_state + row * strides.state_row + c * strides.state_channel
    if conv.conv_windows is None:
        for j in range(tl.maximum(strides.columns - last, 0)):
            x = tl.load(at + (j + last) * strides.state_column, mask=there, other=0.0)
            tl.store(at + j * strides.state_column, x, mask=there)
    else:
        mine = conv.conv_windows + record * strides.windows_row + last * strides.windows_token
        for j in tl.static_range(HISTORY):
            p = mine + j * strides.windows_tap + c * strides.windows_channel
            tl.store(at + j * strides.state_column, tl.load(p, mask=there, other=0.0), mask=there)
