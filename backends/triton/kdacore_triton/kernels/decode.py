"""A decode step in one launch: convolution, gate, norms, state update, records of candidates, gated norm of the output.

A program owns a query/key head of one sequence with all value heads that read it, one after another. So each channel
of the convolution, and each record of a key, belongs to one program, which writes it after its last tile has read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import gate_rate, held, positive, product, rounded, sigmoid
from .convolution import convolve, leave_window, load_taps, load_window
from .groups import (
    CandidateRecords,
    CandidateRecordStrides,
    ConvolutionArrays,
    ConvolutionRows,
    ConvolutionStrides,
    DecodeArrays,
    InputStrides,
    PoolStrides,
    RowStrides,
)
from .records import record_token, replayed
from .recurrent import (
    READ_ACCEPTED,
    READ_INDEXED,
    WRITE_EACH,
    WRITE_INDEXED,
    WRITE_NONE,
    load_state,
    prepare,
    step,
    store_state,
    zero_rows_past,
)
from .state_rows import load_slot

NO_GATE = tl.constexpr(0)
"""The normalised output is not multiplied by anything."""
GATE_BY_SIGMOID = tl.constexpr(1)
GATE_BY_SILU = tl.constexpr(2)


@triton.jit
def load_channels(p, i, mask, MASKED: tl.constexpr):
    """Channels of one token."""
    if MASKED:
        x = tl.load(p + i, mask=mask, other=0.0)
    else:
        x = tl.load(p + i)
    return x


@triton.jit
def computed_once(x, AXIS: tl.constexpr):
    """``x`` (float32), a row along ``AXIS`` of the state's tile, in a layout of its own.

    A short row that a tile needs in another layout is otherwise loaded and computed again in that one by the compiler,
    by every thread for all of its rows. It does not look through this maximum of two equal numbers.

    The layout is the slice of a matrix without its axis ``AXIS``. Without the other one the compiler could make the
    tile's layout from it, and then with some numbers of tokens only, whose sums over K would have another order.
    """
    bits = x.to(tl.int32, bitcast=True)
    both = tl.join(bits, bits)
    if AXIS == 0:
        r = tl.max(tl.trans(both), 0)
    else:
        r = tl.max(both, 1)
    return r.to(tl.float32, bitcast=True)


@triton.jit
def target_tile(arrays, strides, row, hv, jk, jv, POOL: tl.constexpr):
    """Addresses of a tile that is written, worked out late: they take as many registers as the tile."""
    head = arrays.target + (row * strides.target_row + hv * strides.target_head)
    return head + (jk * POOL.target_k + jv * POOL.target_v)


@triton.jit
def source_row(n, state_indices, num_accepted_tokens, has_initial_state, index_row, null, READ: tl.constexpr):
    """``(row, own)``: where sequence n's state is read, negative for zeros, and its slot, negative when it is padding.
    """  # fmt: skip
    row = n
    own = n
    if READ == READ_INDEXED:
        row = load_slot(state_indices + n, null)
        own = row
    if READ == READ_ACCEPTED:
        count = tl.load(num_accepted_tokens + n).to(tl.int64)
        row = tl.load(state_indices + n * index_row + count - 1, mask=count > 0, other=-1).to(tl.int64)
        if null is not None:
            row = tl.where(row == null, -1, row)
        own = tl.where(count > 0, row, 0)
    if has_initial_state is not None:
        row = tl.where(tl.load(has_initial_state + n), row, -1)
    return row, own


@triton.jit
def record_row(n, own, record_indices, num_replayed, tokens, null):
    """``(row, count)``: the row of sequence n's records, negative for none, and how many of them precede the call."""
    row = load_slot(record_indices + n, null)
    row = tl.where(own < 0, -1, row)
    count = n * 0
    if num_replayed is not None:
        count = tl.minimum(tl.maximum(tl.load(num_replayed + n).to(tl.int64), 0), tokens)
        count = tl.where(row < 0, 0, count)
    return row, count


@triton.jit
def convolution_rows(
    n, own, replays, state_indices, num_accepted_tokens, conv_indices, record_indices, index_row, null
):  # fmt: skip
    """``(state, windows, preceding)`` of sequence n: see :class:`ConvolutionRows`."""
    if conv_indices is not None:
        state = load_slot(conv_indices + n, null)
    elif state_indices is not None:
        state = load_slot(state_indices + n * index_row, null)
    else:
        state = n
        if null is not None:
            state = tl.where(state == null, -1, state)
    state = tl.where(own < 0, -1, state)
    windows = n
    if record_indices is not None:
        windows = load_slot(record_indices + n, null)
    windows = tl.where(own < 0, -1, windows)
    preceding = replays
    if num_accepted_tokens is not None:
        preceding = tl.maximum(tl.load(num_accepted_tokens + n).to(tl.int64), 0)
    return state, windows, preceding


@triton.jit
def gated_norm(y, weight, z, eps, V: tl.constexpr, ACTIVATION: tl.constexpr):
    """RMS norm of one head's output, times the activation of ``z``."""
    y = y * tl.rsqrt(tl.sum(product(y, y), 0) / V + eps) * weight
    if ACTIVATION == GATE_BY_SIGMOID:
        y *= sigmoid(z)
    elif ACTIVATION == GATE_BY_SILU:
        y *= z * sigmoid(z)
    return y


@triton.jit(
    do_not_specialize=["T", "H", "index_row", "write_row", "null"],
    do_not_specialize_on_alignment=[
        "beta", "A_log", "cu_seqlens", "state_indices", "num_accepted_tokens", "has_initial_state", "write_indices",
        "conv_indices", "record_indices", "num_replayed",
    ],
)  # fmt: skip
def decode_kernel(
    arrays: DecodeArrays, conv: ConvolutionArrays, records: CandidateRecords,
    beta, A_log, cu_seqlens, state_indices, num_accepted_tokens, has_initial_state, write_indices, conv_indices,
    record_indices, num_replayed,
    scale, lower_bound, norm_eps, T, H,
    strides: InputStrides, beta_strides: RowStrides, z_strides: RowStrides, o_strides: RowStrides,
    state_strides: PoolStrides, conv_strides: ConvolutionStrides, record_strides: CandidateRecordStrides,
    norm_head, index_row, write_row, null,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, POOL: tl.constexpr,
    GATE: tl.constexpr, SCALAR_GATE: tl.constexpr, L2NORM: tl.constexpr, BETA: tl.constexpr, READ: tl.constexpr,
    WRITE: tl.constexpr, INPLACE: tl.constexpr, PACKED: tl.constexpr, ONE: tl.constexpr, FLAT: tl.constexpr,
    TAIL: tl.constexpr, TAPS: tl.constexpr, ACTIVATION: tl.constexpr, OTHER_POOL: tl.constexpr,
    ROWS_ONCE: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Grid: (H, N, 1), or (H * N, 1, 1) when ``FLAT``.

    The last dimension of q, k, v, g, z and o is contiguous; ``POOL`` holds the states' strides over K and V. ``GROUP``
    value heads read one query/key head. ``TAPS``: width of the convolution, 0 without. A tile is ``BV`` columns of a
    state; with a norm it has them all. ``ONE``: exactly one token per sequence, not packed. ``TAIL``: one more sequence
    in the grid, whose programs write zeros to the rows of ``o`` behind the pack. ``INPLACE``: the caller's pool is
    written, and so are the convolution's states and windows. ``OTHER_POOL``: it is not the one that is read.
    ``ROWS_ONCE``: rows have fewer elements than the program has threads; see :func:`computed_once`.

    ``index_row`` and ``write_row`` are the strides of ``state_indices`` and ``write_indices`` over sequences; ``null``
    is the row that names no slot, besides negative ones. A sequence that is padding is computed like any other from
    whatever its tokens hold, and zeros are written in the place of its results.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = PARTS * GROUP
    MASK_K: tl.constexpr = KP != K
    MASK_V: tl.constexpr = V % BV != 0
    MASK_S: tl.constexpr = MASK_K or MASK_V
    RECORDS: tl.constexpr = records.update is not None
    STATE: tl.constexpr = arrays.target.dtype.element_ty if arrays.target is not None else tl.float32
    pid = tl.program_id(0)
    if FLAT:
        h = pid % H
        n = pid // H
    else:
        h = pid
        n = tl.program_id(1)
    h64 = h.to(tl.int64)
    n64 = n.to(tl.int64)
    ik = tl.arange(0, KP)
    jv = tl.arange(0, BV)
    mk = ik < K

    if TAIL:
        if FLAT:
            sequences = tl.num_programs(0) // H - 1
        else:
            sequences = tl.num_programs(1) - 1
        if n == sequences:
            end = tl.load(cu_seqlens + n).to(tl.int32)
            for tile in range(TILES):
                iv = (tile % PARTS) * BV + jv
                head = h64 * GROUP + tile // PARTS
                zero_rows_past(arrays.o + head * o_strides.head, end, T, o_strides.token, iv, iv < V)
            return

    row, own = source_row(n64, state_indices, num_accepted_tokens, has_initial_state, index_row, null, READ)
    recorded = n64 * 0 - 1
    replays = n64 * 0
    if RECORDS:
        recorded, replays = record_row(n64, own, record_indices, num_replayed, record_strides.tokens, null)
    length = n * 0 + 1
    batch = n64
    first = n64 * 0
    if PACKED:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - first).to(tl.int32)
        batch = n64 * 0
    elif not ONE:
        length = length * T

    q = arrays.q + batch * strides.q_batch + first * strides.q_token + h64 * strides.q_head
    k = arrays.k + batch * strides.k_batch + first * strides.k_token + h64 * strides.k_head
    if TAPS > 0:
        conv_row, windows_row, preceding = convolution_rows(
            n64,
            own,
            replays,
            state_indices,
            num_accepted_tokens,
            conv_indices,
            record_indices,
            index_row,
            null,
        )
        rows = ConvolutionRows(conv_row, windows_row, preceding, tl.minimum(conv_row, row) + 1)

    # Where the state after the first token goes, or the final one; negative for nowhere.
    goal = n64
    if INPLACE:
        if WRITE == WRITE_INDEXED and write_indices is None:
            goal = own
        elif WRITE >= WRITE_INDEXED:
            if write_indices is None:
                table = state_indices + n64 * index_row
            else:
                table = write_indices + n64 * write_row
            goal = load_slot(table, null)
        elif null is not None:
            goal = tl.where(goal == null, -1, goal)
        goal = tl.where(own < 0, -1, goal)
    replayed_goal = goal
    final_goal = goal
    if RECORDS:
        replayed_goal = tl.where(recorded < 0, -1, goal)
        if not OTHER_POOL:  # it stays where it is
            replayed_goal = tl.where((replays == 0) & (goal == row), -1, replayed_goal)
        final_goal = tl.where(recorded < 0, goal, -1)

    # Wide offsets only where the caller's own strides need them.
    WIDE_SOURCE: tl.constexpr = POOL.source_k * KP + POOL.source_v * (V + BV) >= 2**31
    WIDE_TARGET: tl.constexpr = POOL.target_k * KP + POOL.target_v * (V + BV) >= 2**31
    jk = ik[:, None]
    if WIDE_SOURCE or WIDE_TARGET:
        jk = jk.to(tl.int64)

    for tile in range(TILES):
        # h64, but the compiler does not know that the condition holds. Otherwise it works out the addresses that all
        # tiles share before the loop, and keeps others from tile to tile: they would be spilled.
        same_h = h64
        if TILES > 1:
            same_h += tl.where(tile < H * TILES, 0, 1)
        hv = same_h * GROUP + tile // PARTS
        iv = (tile % PARTS) * BV + jv
        mv = iv < V
        last_of_head = tile % PARTS - (PARTS - 2)
        last_of_group = tile - (TILES - 2)
        at_q = q
        at_k = k
        at_v = arrays.v + batch * strides.v_batch + first * strides.v_token + hv * strides.v_head
        at_g = arrays.g + batch * strides.g_batch + first * strides.g_token + hv * strides.g_head
        at_beta = beta + batch * beta_strides.batch + first * beta_strides.token + hv * beta_strides.head
        at_o = arrays.o + batch * o_strides.batch + first * o_strides.token + hv * o_strides.head
        first_v = at_v
        if arrays.z is not None:
            at_z = arrays.z + batch * z_strides.batch + first * z_strides.token + hv * z_strides.head
        if TAPS > 0:
            cq = same_h * K + ik
            ck = cq + H * K
            cv = 2 * H * K + hv * V + iv
            # Those of q and k for each head of the group again: kept, they would be spilled.
            q1, q2, q3 = load_window(conv, conv_strides, rows, cq, mk, TAPS)
            k1, k2, k3 = load_window(conv, conv_strides, rows, ck, mk, TAPS)
            v1, v2, v3 = load_window(conv, conv_strides, rows, cv, mv, TAPS)
            fq0, fq1, fq2, fq3, bias_q = load_taps(conv, conv_strides, cq, mk, TAPS)
            fk0, fk1, fk2, fk3, bias_k = load_taps(conv, conv_strides, ck, mk, TAPS)
            fv0, fv1, fv2, fv3, bias_v = load_taps(conv, conv_strides, cv, mv, TAPS)
            rq1, rq2, rq3 = q1, q2, q3
            rk1, rk2, rk3 = k1, k2, k3
            rv1, rv2, rv3 = v1, v2, v3

        cell_v = iv[None, :]
        if WIDE_SOURCE or WIDE_TARGET:
            cell_v = cell_v.to(tl.int64)
        source = arrays.source + (
            row * state_strides.source_row
            + hv * state_strides.source_head
            + jk * POOL.source_k
            + cell_v * POOL.source_v
        )
        S = load_state(source, jk, mk[:, None], mv[None, :], row, True, MASK_S)
        bias = 0.0
        if arrays.dt_bias is not None:
            if SCALAR_GATE:
                bias = held(tl.load(arrays.dt_bias + hv).to(tl.float32))
            else:
                bias = held(load_channels(arrays.dt_bias + hv * K, ik, mk, MASK_K).to(tl.float32))
        a_exp = 1.0
        if A_log is not None:
            a_exp = gate_rate(tl.load(A_log + hv))
        if arrays.norm_weight is not None:
            weight = load_channels(arrays.norm_weight + hv * norm_head, iv, mv, MASK_V).to(tl.float32)

        S = S.to(tl.float32)
        if RECORDS:
            S = replayed(S, records, record_strides, recorded, replays, h64, hv, ik, iv, mk, mv, SCALAR_GATE)
            kept = rounded(S, STATE, BY_HAND)
            p = target_tile(arrays, state_strides, replayed_goal, hv, jk, cell_v, POOL)
            store_state(p, kept, jk, mk[:, None], mv[None, :], replayed_goal, True, MASK_S)
            S = tl.where(positive(jk + cell_v, recorded + 1), kept.to(tl.float32), S)
            tl.debug_barrier()  # records that were read are written below, by other threads perhaps

        if TAPS > 0 and INPLACE:
            # Before the step, which needs the registers.
            tl.debug_barrier()  # a window may be written by other threads than have read it
            candidates = recorded + 1
            if WRITE == WRITE_EACH:
                candidates = n64 * 0 + 1
            leave_window(
                conv, conv_strides, rows, first_v, strides.v_token, iv, cv, mv, v1, v2, v3, length, candidates,
                TAPS, ONE, WRITE == WRITE_EACH,
            )  # fmt: skip
            # Other heads of the group read those of q and k, too. A branch instead would move the whole tile.
            last_rows = ConvolutionRows(
                tl.where(last_of_group > 0, conv_row, -1),
                tl.where(last_of_group > 0, windows_row, -1),
                preceding,
                rows.live,
            )
            leave_window(
                conv, conv_strides, last_rows, q, strides.q_token, ik, cq, mk, q1, q2, q3, length, candidates,
                TAPS, ONE, WRITE == WRITE_EACH,
            )  # fmt: skip
            leave_window(
                conv, conv_strides, last_rows, k, strides.k_token, ik, ck, mk, k1, k2, k3, length, candidates,
                TAPS, ONE, WRITE == WRITE_EACH,
            )  # fmt: skip

        for t in range(length):
            xq = load_channels(at_q, ik, mk, MASK_K)
            xk = load_channels(at_k, ik, mk, MASK_K)
            xv = load_channels(at_v, iv, mv, MASK_V)
            if SCALAR_GATE:
                xg = tl.load(at_g)
            else:
                xg = load_channels(at_g, ik, mk, MASK_K)
            xb = tl.load(at_beta)
            yq = xq
            yk = xk
            yv = xv
            if TAPS > 0:
                yq = convolve(xq, rq1, rq2, rq3, fq0, fq1, fq2, fq3, bias_q, TAPS)
                yk = convolve(xk, rk1, rk2, rk3, fk0, fk1, fk2, fk3, bias_k, TAPS)
                yv = convolve(xv, rv1, rv2, rv3, fv0, fv1, fv2, fv3, bias_v, TAPS)
                rq1, rq2, rq3 = xq, rq1, rq2
                rk1, rk2, rk3 = xk, rk1, rk2
                rv1, rv2, rv3 = xv, rv1, rv2
            yq, yk, decay, yb, qk = prepare(
                yq, yk, xg, xb, bias, a_exp, scale, lower_bound, GATE, L2NORM, BETA
            )
            if ROWS_ONCE:
                yq = computed_once(yq, 0)
                yk = computed_once(yk, 0)
                yv = computed_once(yv.to(tl.float32), 1)
                if not SCALAR_GATE:
                    decay = computed_once(decay, 0)
            S, y, update = step(S, yv, yq, yk, decay, yb, qk, SCALAR_GATE)
            if arrays.norm_weight is not None:
                z = y
                if arrays.z is not None:
                    z = load_channels(at_z, iv, mv, MASK_V).to(tl.float32)
                y = gated_norm(y, weight, z, norm_eps, V, ACTIVATION)
            y = tl.where(positive(iv, own + 1), y, 0.0)
            y = rounded(y, arrays.o.dtype.element_ty, BY_HAND)
            if MASK_V:
                tl.store(at_o + iv, y, mask=mv)
            else:
                tl.store(at_o + iv, y)
            if RECORDS:
                record_token(
                    records, record_strides, recorded, n * 0 + t, h64, hv, ik, iv, mk, mv, update, yk, decay,
                    last_of_head, last_of_group, SCALAR_GATE,
                )  # fmt: skip
            if WRITE == WRITE_EACH:
                goal = tl.where(own < 0, -1, load_slot(table + t, null))
                p = target_tile(arrays, state_strides, goal, hv, jk, cell_v, POOL)
                kept = rounded(S, STATE, BY_HAND)
                store_state(p, kept, jk, mk[:, None], mv[None, :], goal, True, MASK_S)
            at_q += strides.q_token
            at_k += strides.k_token
            at_v += strides.v_token
            at_g += strides.g_token
            at_beta += beta_strides.token
            at_o += o_strides.token
            if arrays.z is not None:
                at_z += z_strides.token

        if WRITE != WRITE_NONE and WRITE != WRITE_EACH:
            S = tl.where(positive(jk + cell_v, own + 1), S, 0.0)
            p = target_tile(arrays, state_strides, final_goal, hv, jk, cell_v, POOL)
            kept = rounded(S, STATE, BY_HAND)
            store_state(p, kept, jk, mk[:, None], mv[None, :], final_goal, True, MASK_S)
