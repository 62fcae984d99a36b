"""Launch 2 of 3 of the chunk backward: both serial recurrences over the chunks, side by side in one grid.

Even programs compute the states, odd programs the gradients of the states in reverse order; neither
needs the other. Both keep the transposed state ``[BV, KP]`` in float32 registers, where it is the left
operand of its own products, and both split V. Per chunk, with the tiles of the prepare kernel::

    forward   hT = S^T;  vT = uT - S^T w^T  (stored over uT);    S^T <- S^T diag(last) + vT kg
    reverse   dhT = dS^T; dvT = dS^T kg^T + do^T Aqk;            dS^T <- dS^T diag(last) + do^T qg - dvT w;
              drT = dvT inv

``hT`` is the state at the chunk's start, ``dhT`` the gradient of the state at its end, ``dvT`` that of
v_new, and ``drT`` that of the right-hand side that inv is multiplied with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import mma, mma_acc, sequence_span
from .groups import BoundaryStates, PreparedTiles


@triton.jit
def load_state(state, nh, vs, ks, K, V, V_FIRST: tl.constexpr, BY_ROWS: tl.constexpr):
    """State of sequence-head ``nh`` as a float32 tile ``[V rows, K columns]``, 0 outside.

    BY_ROWS: a state ``[K, V]`` is loaded as it lies in memory and transposed in registers. Its addresses and masks take
    fewer registers, and so do the loops after it.
    """
    if BY_ROWS and not V_FIRST:
        inside = (ks < K)[:, None] & (vs < V)[None, :]
        at = ks[:, None] * V + vs[None, :]
        S = tl.trans(tl.load(state + nh.to(tl.int64) * K * V + at, mask=inside, other=0.0))
    else:
        inside = (vs < V)[:, None] & (ks < K)[None, :]
        if V_FIRST:
            at = vs[:, None] * K + ks[None, :]
        else:
            at = ks[None, :] * V + vs[:, None]
        S = tl.load(state + nh.to(tl.int64) * K * V + at, mask=inside, other=0.0)
    return S.to(tl.float32)


@triton.jit
def store_state(state, S, nh, vs, ks, K, V, V_FIRST: tl.constexpr):
    """Inverse of :func:`load_state`, rounded to the array's dtype."""
    inside = (vs < V)[:, None] & (ks < K)[None, :]
    if V_FIRST:
        at = vs[:, None] * K + ks[None, :]
    else:
        at = ks[None, :] * V + vs[:, None]
    tl.store(state + nh.to(tl.int64) * K * V + at, S.to(state.dtype.element_ty), mask=inside)


@triton.jit
def load_last(last, pid, ks, LAST: tl.constexpr, SCALAR_GATE: tl.constexpr):
    """``2^gc_last`` of a chunk as a row ``[1, KP]`` (``[1, 1]`` with one gate per head); LAST: values per chunk."""
    if SCALAR_GATE:
        d = tl.load(last + pid + tl.zeros([1, 1], tl.int32))
    else:
        d = tl.load(last + pid * LAST + ks)[None, :]
    return d


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def chunk_backward_scan_kernel(
    tiles: PreparedTiles, last, do, hT, dhT, drT, states: BoundaryStates, cu_seqlens,
    T, NT, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LAST: tl.constexpr,
    SCALAR_GATE: tl.constexpr, PACKED: tl.constexpr,
    V_FIRST: tl.constexpr, BY_ROWS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(2 * (VP // BV) * N * HV,)``."""
    pid = tl.program_id(0)
    reverse = pid % 2
    iv = (pid // 2) % (VP // BV)
    nh = pid // (2 * (VP // BV))
    n = nh // HV
    hv = nh - n * HV
    bos, length, slot = sequence_span(cu_seqlens, n, T, NT, C, PACKED)
    chunks = (length + C - 1) // C
    r = tl.arange(0, C)
    ks = tl.arange(0, KP)
    vs = iv * BV + tl.arange(0, BV)
    square = r[:, None] * C + r[None, :]
    wide = r[:, None] * KP + ks[None, :]
    tall = vs[:, None] * C + r[None, :]
    flat = vs[:, None] * KP + ks[None, :]
    dtype = hT.dtype.element_ty

    if reverse == 0:
        S = tl.zeros([BV, KP], tl.float32)
        if states.initial_state is not None:
            S = load_state(states.initial_state, nh, vs, ks, K, V, V_FIRST, BY_ROWS)
        for c in range(chunks):
            at = (slot + c).to(tl.int64) * HV + hv
            S16 = S.to(dtype)
            tl.store(hT + at * (VP * KP) + flat, S16)
            vt = tl.load(tiles.uT + at * (VP * C) + tall).to(tl.float32)
            vt -= mma(S16, tl.trans(tl.load(tiles.w + at * (C * KP) + wide)), DOT)
            v16 = vt.to(dtype)
            tl.store(tiles.uT + at * (VP * C) + tall, v16)
            S *= load_last(last, at, ks, LAST, SCALAR_GATE)
            S = mma_acc(v16, tl.load(tiles.kg + at * (C * KP) + wide), S, DOT)
    else:
        dS = tl.zeros([BV, KP], tl.float32)
        if states.d_final_state is not None:
            dS = load_state(states.d_final_state, nh, vs, ks, K, V, V_FIRST, BY_ROWS)
        for i in range(chunks):
            c = chunks - 1 - i
            at = (slot + c).to(tl.int64) * HV + hv
            dS16 = dS.to(dtype)
            tl.store(dhT + at * (VP * KP) + flat, dS16)
            row = c * C + r
            o_at = ((bos + row) * HV + hv)[:, None] * V + vs[None, :]
            dot = tl.load(do + o_at, mask=(row < length)[:, None] & (vs < V)[None, :], other=0.0)
            dot = tl.trans(dot.to(dtype))
            dv = mma(dS16, tl.trans(tl.load(tiles.kg + at * (C * KP) + wide)), DOT)
            dv = mma_acc(dot, tl.load(tiles.Aqk + at * (C * C) + square), dv, DOT)
            d16 = dv.to(dtype)
            dS *= load_last(last, at, ks, LAST, SCALAR_GATE)
            dS = mma_acc(dot, tl.load(tiles.qg + at * (C * KP) + wide), dS, DOT)
            dS = mma_acc(-d16, tl.load(tiles.w + at * (C * KP) + wide), dS, DOT)
            dr = mma(d16, tl.load(tiles.inv + at * (C * C) + square), DOT)
            tl.store(drT + at * (VP * C) + tall, dr.to(dtype))
        if states.d_initial_state is not None:
            store_state(states.d_initial_state, dS, nh, vs, ks, K, V, V_FIRST)
