"""The recurrence token by token: gate, norms, sigmoid and state update of every token in one launch.

A program owns ``BV`` columns of one sequence-head's state and keeps them in registers over all tokens, so the state
crosses memory once each way whatever T is. Programs never share a state element, which makes in-place pools safe.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    ADDED_IN_PAIRS,
    BETA_SIGMOID,
    BETA_TWICE_SIGMOID,
    gate_rate,
    held,
    log2_decay,
    positive,
    product,
    sigmoid,
)
from .groups import InputStrides, PoolStrides, RecurrentArrays, RowStrides
from .state_rows import load_slot

READ_NONE = tl.constexpr(0)
"""The state starts at zero."""
READ_SEQUENCE = tl.constexpr(1)
"""Sequence n starts from row n."""
READ_INDEXED = tl.constexpr(2)
"""Sequence n starts from row ``state_indices[n]``; it is padding when that is no slot."""
READ_ACCEPTED = tl.constexpr(3)
"""Sequence n starts from row ``state_indices[n, accepted - 1]``, where ``accepted`` is ``num_accepted_tokens[n]``. It
is padding when that is no slot, and starts from zero when ``accepted`` is 0."""

WRITE_NONE = tl.constexpr(0)
WRITE_SEQUENCE = tl.constexpr(1)
"""The final state goes to row n."""
WRITE_INDEXED = tl.constexpr(2)
"""The final state goes to row ``write_indices[n]``, without them ``state_indices[n]``; nowhere if that is no slot."""
WRITE_EACH = tl.constexpr(3)
"""The state after token t goes to row ``write_indices[n, t]``, without them ``state_indices[n, t]``; nowhere if that is
no slot."""


@triton.jit
def load_row(p, i, mask, left, MASKED: tl.constexpr):
    """A row of one token's input; zero where masked, and everywhere when no token is ``left``."""
    if MASKED:
        x = tl.load(p + i, mask=mask & positive(i, left), other=0.0)
    else:
        x = tl.load(p + i)
    return x


@triton.jit
def load_number(p, left, MASKED: tl.constexpr):
    """One number of one token's input, zero when no token is ``left``."""
    if MASKED:
        x = tl.load(p, mask=left > 0, other=0.0)
    else:
        x = tl.load(p)
    return x


@triton.jit
def load_key(q, k, g, rate, ik, mk, left, SCALAR_GATE: tl.constexpr, MASKED: tl.constexpr):
    """What one token brings besides v, as it lies in memory."""
    xq = load_row(q, ik, mk, left, MASKED)
    xk = load_row(k, ik, mk, left, MASKED)
    if SCALAR_GATE:
        xg = load_number(g, left, MASKED)
    else:
        xg = load_row(g, ik, mk, left, MASKED)
    return xq, xk, xg, load_number(rate, left, MASKED)


@triton.jit
def load_state(p, jk, mk, mv, row, MAYBE_NONE: tl.constexpr, MASKED: tl.constexpr):
    """A tile of the state in its own dtype; zero where masked, and everywhere when the row is negative."""
    if MASKED and MAYBE_NONE:
        S = tl.load(p, mask=mk & mv & positive(jk, row + 1), other=0.0)
    elif MASKED:
        S = tl.load(p, mask=mk & mv, other=0.0)
    elif MAYBE_NONE:
        S = tl.load(p, mask=positive(jk, row + 1), other=0.0)
    else:
        S = tl.load(p)
    return S


@triton.jit
def store_state(p, S, jk, mk, mv, row, MAYBE_NONE: tl.constexpr, MASKED: tl.constexpr):
    """Write a tile, rounded to the state's dtype; nothing when the row is negative."""
    S = S.to(p.dtype.element_ty)
    if MASKED and MAYBE_NONE:
        tl.store(p, S, mask=mk & mv & positive(jk, row + 1))
    elif MASKED:
        tl.store(p, S, mask=mk & mv)
    elif MAYBE_NONE:
        tl.store(p, S, mask=positive(jk, row + 1))
    else:
        tl.store(p, S)


@triton.jit
def prepare(
    xq, xk, xg, xb, bias, a_exp, scale, lower_bound,
    GATE: tl.constexpr, L2NORM: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    """What a token's update needs beside the state and v: ``q, k, decay, beta, q . k``; float32, normalised, scaled."""
    q = xq.to(tl.float32)
    k = xk.to(tl.float32)
    beta = xb.to(tl.float32)
    if L2NORM:
        # One reduction for all three: each costs a trip through shared memory.
        qk = product(q, k)
        squares, cross = tl.split(tl.sum(tl.join(tl.join(product(q, q), product(k, k)), tl.join(qk, qk)), 0))
        qq, kk = tl.split(squares)
        qk, _ = tl.split(cross)
        rq = scale * tl.rsqrt(qq + 1e-6)
        rk = tl.rsqrt(kk + 1e-6)
        q *= rq
        k *= rk
        qk *= rq * rk
    else:
        q *= scale
        qk = tl.sum(product(q, k), 0)
    if BETA == BETA_SIGMOID:
        beta = sigmoid(beta)
    elif BETA == BETA_TWICE_SIGMOID:
        beta = 2.0 * sigmoid(beta)
    decay = tl.exp2(log2_decay(xg.to(tl.float32) + bias, a_exp, lower_bound, GATE))
    return q, k, decay, beta, qk


@triton.jit
def step(S, xv, q, k, decay, beta, qk, SCALAR_GATE: tl.constexpr):
    """One token, float32: the new state ``S [KP, BV]``, the output ``[BV]``, and ``update [BV]``: what was added to the
    decayed state is ``outer(k, update)``.

    All kernels that call this must give the same bits for the same tile. The sums have the order of the tile's layout,
    which the compiler derives from loads and stores of the state as long as no other operand's layout fits the tile.
    Every fused multiply-add outside the sums is spelled out: the compiler does not find one across a layout conversion.
    """
    S = S.to(tl.float32)
    if SCALAR_GATE:
        S *= decay
    else:
        S *= decay[:, None]
    # Both products of the decayed state in one reduction; q @ (S + k delta) is q @ S + (q . k) delta.
    if ADDED_IN_PAIRS or S.shape[0] <= 32:  # the latter: a lane may hold one row only
        both = tl.join(product(S, k[:, None]), product(S, q[:, None]))
    else:
        both = tl.join(S * k[:, None], S * q[:, None])
    kS, qS = tl.split(tl.sum(both, 0))
    delta = beta * (xv.to(tl.float32) - kS)
    return tl.fma(k[:, None], delta[None, :], S), tl.fma(qk, delta, qS), delta


@triton.jit
def advance(S, xv, q, k, decay, beta, qk, SCALAR_GATE: tl.constexpr):
    """One token: the new state ``S [KP, BV]`` and the output ``[BV]``, float32."""
    S, y, _ = step(S, xv, q, k, decay, beta, qk, SCALAR_GATE)
    return S, y


@triton.jit
def zero_rows_past(o, end, T, o_t, iv, mv):
    """Zeros in rows ``end`` to ``T`` of one head's output: tokens behind the last sequence of a pack."""
    i = tl.arange(0, 16)
    for t in range(end, T, 16):
        row = (t + i).to(tl.int64)
        at = row[:, None] * o_t + iv[None, :]
        tl.store(o + at, tl.zeros(at.shape, o.dtype.element_ty), mask=(row < T)[:, None] & mv[None, :])


@triton.jit(
    do_not_specialize=["T", "HV", "beta_batch", "beta_token", "beta_head", "index_row", "write_row", "null"],
    do_not_specialize_on_alignment=[
        "beta", "A_log", "cu_seqlens", "state_indices", "num_accepted_tokens", "has_initial_state", "write_indices"
    ],
)  # fmt: skip
def recurrent_kernel(
    arrays: RecurrentArrays,
    beta, A_log, cu_seqlens, state_indices, num_accepted_tokens, has_initial_state, write_indices,
    scale, lower_bound, T, HV, GROUP,
    strides: InputStrides, beta_batch, beta_token, beta_head, o_strides: RowStrides, state_strides: PoolStrides,
    index_row, write_row, null,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, POOL: tl.constexpr, GATE: tl.constexpr,
    SCALAR_GATE: tl.constexpr, L2NORM: tl.constexpr, BETA: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    PACKED: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr, FLAT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(V / BV) * HV, N, 1), or (ceil(V / BV) * HV * N, 1, 1) when ``FLAT``: a state's parts lie together.

    The last dimension of q, k, v, g and o is contiguous; ``POOL`` holds the states' strides over K and V. ``GROUP``
    value heads share one query/key head. ``ONE``: exactly one token per sequence, not packed. ``WIDE``: some offset to
    a sequence or head of q, k, v, g, beta or o needs 64 bits. ``TAIL`` (packed): one more sequence in the grid, whose
    programs write zeros to the rows of ``o`` behind the pack.

    ``index_row`` and ``write_row`` are the strides of ``state_indices`` and ``write_indices`` over sequences; ``null``
    is the row that names no slot, besides negative ones. A sequence that is padding is computed like any other from
    whatever its tokens hold, and zeros are written in the place of its results.
    """
    # The token's place in each array: a loop carries them in this order.
    q, k, v, g, o = arrays.q, arrays.k, arrays.v, arrays.g, arrays.o
    rate = beta
    PARTS: tl.constexpr = (V + BV - 1) // BV
    MASK_K: tl.constexpr = KP != K
    MASK_V: tl.constexpr = V % BV != 0
    MASK_S: tl.constexpr = MASK_K or MASK_V
    MAYBE_PADDING: tl.constexpr = READ >= READ_INDEXED
    MAYBE_NO_SOURCE: tl.constexpr = MAYBE_PADDING or has_initial_state is not None
    MAYBE_NO_TARGET: tl.constexpr = WRITE >= WRITE_INDEXED
    pid = tl.program_id(0)
    if FLAT:
        hv = (pid // PARTS) % HV
        n = (pid // PARTS) // HV
    else:
        hv = pid // PARTS
        n = tl.program_id(1)
    h = hv // GROUP
    ik = tl.arange(0, KP)
    iv = (pid % PARTS) * BV + tl.arange(0, BV)
    mk = ik < K
    mv = iv < V

    if TAIL:
        if FLAT:
            sequences = tl.num_programs(0) // (PARTS * HV) - 1
        else:
            sequences = tl.num_programs(1) - 1
        if n == sequences:
            end = tl.load(cu_seqlens + n).to(tl.int32)
            zero_rows_past(o + hv.to(tl.int64) * o_strides.head, end, T, o_strides.token, iv, mv)
            return

    # ``row``: where the state is read; ``own``: the slot of the sequence, negative when it is padding.
    n64 = n.to(tl.int64)
    row = n64
    own = n64
    if READ == READ_INDEXED:
        row = load_slot(state_indices + n, null)
        own = row
    if READ == READ_ACCEPTED:
        count = tl.load(num_accepted_tokens + n).to(tl.int64)
        row = tl.load(state_indices + n64 * index_row + count - 1, mask=count > 0, other=-1).to(tl.int64)
        if null is not None:
            row = tl.where(row == null, -1, row)
        own = tl.where(count > 0, row, 0)
    if has_initial_state is not None:
        row = tl.where(tl.load(has_initial_state + n), row, -1)

    length = T
    if PACKED:
        first = tl.load(cu_seqlens + n).to(tl.int32)
        length = tl.load(cu_seqlens + n + 1).to(tl.int32) - first
        batch = n * 0
    else:
        first = n * 0
        batch = n
    if WIDE:
        batch = batch.to(tl.int64)
        first = first.to(tl.int64)
        h = h.to(tl.int64)
        hv = hv.to(tl.int64)
    q += batch * strides.q_batch + first * strides.q_token + h * strides.q_head
    k += batch * strides.k_batch + first * strides.k_token + h * strides.k_head
    v += batch * strides.v_batch + first * strides.v_token + hv * strides.v_head
    g += batch * strides.g_batch + first * strides.g_token + hv * strides.g_head
    rate += batch * beta_batch + first * beta_token + hv * beta_head
    o += batch * o_strides.batch + first * o_strides.token + hv * o_strides.head

    # Load the token before the state, whose addresses may depend on an index.
    xq, xk, xg, xb = load_key(q, k, g, rate, ik, mk, length, SCALAR_GATE, PACKED or MASK_K)
    xv = load_row(v, iv, mv, length, PACKED or MASK_V)

    # Wide offsets only where the caller's own strides need them.
    jk = ik[:, None]
    jv = iv[None, :]
    WIDE_SOURCE: tl.constexpr = POOL.source_k * KP + POOL.source_v * (V + BV) >= 2**31
    WIDE_TARGET: tl.constexpr = POOL.target_k * KP + POOL.target_v * (V + BV) >= 2**31
    if WIDE_SOURCE or WIDE_TARGET:
        jk = jk.to(tl.int64)
        jv = jv.to(tl.int64)
    S = tl.zeros([KP, BV], dtype=tl.float32)
    if READ != READ_NONE:
        source = arrays.source + (
            row * state_strides.source_row
            + hv.to(tl.int64) * state_strides.source_head
            + jk * POOL.source_k
            + jv * POOL.source_v
        )
        S = load_state(source, jk, mk[:, None], mv[None, :], row, MAYBE_NO_SOURCE, MASK_S)
    # Where the state after the first token goes, or the final one.
    goal = n64
    if WRITE == WRITE_INDEXED and write_indices is None:
        goal = own
    elif MAYBE_NO_TARGET:
        if write_indices is None:
            table = state_indices + n64 * index_row
        else:
            table = write_indices + n64 * write_row
        goal = load_slot(table, null)
        if MAYBE_PADDING:
            goal = tl.where(own < 0, -1, goal)
    if WRITE != WRITE_NONE:
        head = hv.to(tl.int64) * state_strides.target_head
        target = arrays.target + (head + jk * POOL.target_k + jv * POOL.target_v)

    bias = 0.0
    if arrays.dt_bias is not None:
        if SCALAR_GATE:
            bias = held(tl.load(arrays.dt_bias + hv).to(tl.float32))
        else:
            bias = held(load_row(arrays.dt_bias + hv * K, ik, mk, 1, MASK_K).to(tl.float32))
    a_exp = 1.0
    if A_log is not None:
        a_exp = gate_rate(tl.load(A_log + hv))

    if ONE:
        yq, yk, decay, yb, qk = prepare(xq, xk, xg, xb, bias, a_exp, scale, lower_bound, GATE, L2NORM, BETA)
        S, y = advance(S, xv, yq, yk, decay, yb, qk, SCALAR_GATE)
        if MAYBE_PADDING:
            y = tl.where(positive(iv, own + 1), y, 0.0)
        if MASK_V:
            tl.store(o + iv, y.to(o.dtype.element_ty), mask=mv)
        else:
            tl.store(o + iv, y.to(o.dtype.element_ty))
    else:
        S = S.to(tl.float32)
        for t in range(length):
            q += strides.q_token
            k += strides.k_token
            v += strides.v_token
            g += strides.g_token
            rate += beta_token
            left = length - t - 1
            nq, nk, ng, nb = load_key(q, k, g, rate, ik, mk, left, SCALAR_GATE, True)
            nv = load_row(v, iv, mv, left, True)
            yq, yk, decay, yb, qk = prepare(
                xq, xk, xg, xb, bias, a_exp, scale, lower_bound, GATE, L2NORM, BETA
            )
            S, y = advance(S, xv, yq, yk, decay, yb, qk, SCALAR_GATE)
            if MAYBE_PADDING:
                y = tl.where(positive(iv, own + 1), y, 0.0)
            tl.store(o + iv, y.to(o.dtype.element_ty), mask=mv)
            o += o_strides.token
            if WRITE == WRITE_EACH:
                goal = load_slot(table + t, null)
                if MAYBE_PADDING:
                    goal = tl.where(own < 0, -1, goal)
                p = target + goal * state_strides.target_row
                store_state(p, S, jk, mk[:, None], mv[None, :], goal, True, MASK_S)
            xq, xk, xv, xg, xb = nq, nk, nv, ng, nb
    if MAYBE_PADDING and WRITE == WRITE_SEQUENCE:
        S = tl.where(positive(jk + jv, own + 1), S, 0.0)
    if WRITE != WRITE_NONE and (ONE or WRITE != WRITE_EACH):
        p = target + goal * state_strides.target_row
        store_state(p, S, jk, mk[:, None], mv[None, :], goal, MAYBE_NO_TARGET, MASK_S)
