"""After the scan: checkpoints that lie inside a chunk of more than 16 rows, from the state at the chunk's start.

With the first ``m`` rows of a chunk that starts from S, and the records that the prepare kernel wrote::

    v' = ut^T - w S         S_m = 2^(gc_m) S + sum over i < m of k_i 2^(gc_m - gc_i) v'_i

Rows of v' do not depend on later ones. The records hold ``k_i`` decayed to the chunk's last row, so k and the gates
are read again. A checkpoint at a chunk's start is copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_forward_prepare import SCALAR, load_gate, load_rows
from .common import exp2, gate_decay, mma, mma_acc, rnorm, sequence_span
from .gate_and_beta import load_gate_bias, load_gate_rate, load_scalar_bias
from .state_rows import load_slot, pool_cell
from .step_sums import step_operand, sum_steps


@triton.jit
def sequence_of_token(cu_seqlens, N, token):
    """The packed sequence that holds a token: the last one that starts at or before it."""
    lo = 0
    hi = N - 1
    while lo < hi:
        mid = (lo + hi + 1) // 2
        if tl.load(cu_seqlens + mid) <= token:
            lo = mid
        else:
            hi = mid - 1
    return lo


@triton.jit(
    do_not_specialize=["T", "NT", "N", "H", "HV", "null"],
    do_not_specialize_on_alignment=["indices_ptr", "offsets_ptr", "kept_ptr"],
)
def chunk_forward_checkpoints_kernel(
    k_ptr, g_ptr, a_log_ptr, bias_ptr, cu_ptr, rec_ptr, mids_ptr, pool_ptr, indices_ptr, offsets_ptr, kept_ptr,
    T, NT, N, H, HV, lower_bound, target_row, target_h, null,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BVP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    FAMILY: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    ASM: tl.constexpr, TARGET_K: tl.constexpr, TARGET_V: tl.constexpr,
):  # fmt: skip
    """Grid: checkpoints * HV * (BVP // BV). ``mids_ptr``: ``[checkpoints, HV, BVP, BK]`` float32, from the scan."""
    pid = tl.program_id(0)
    v0 = (pid % (BVP // BV)) * BV
    nth = pid // (BVP // BV) // HV
    hv = (pid // (BVP // BV) - nth * HV).to(tl.int64)
    h = hv // (HV // H)
    goal = load_slot(kept_ptr + nth, null)
    if goal < 0:
        return
    offset = tl.load(offsets_ptr + nth).to(tl.int64)
    n = nth * 0
    if PACKED:
        n = sequence_of_token(cu_ptr, N, offset) + nth * 0
    if indices_ptr is not None:  # noqa: SIM102  (a constexpr test, then one of values)
        if load_slot(indices_ptr + n, null) < 0:
            return
    bos, length, slot = sequence_span(cu_ptr, n, T, NT, C, PACKED)
    if (offset < bos) | (offset >= bos + length):
        return
    chunk = (offset - bos) // C
    rows = (offset - bos - chunk * C).to(tl.int32)

    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    vv = v0 + tl.arange(0, BV)
    s = tl.load(mids_ptr + (nth.to(tl.int64) * HV + hv) * (BVP * BK) + vv[:, None] * BK + d[None, :])
    if rows > 0:
        start = bos + chunk * C
        inside = i < rows
        token = start + i
        rec = rec_ptr + ((slot + chunk) * HV + hv) * (C * (3 * BK + BVP + C))
        w = tl.load(rec + i[:, None] * BK + d[None, :]).to(tl.float32)
        ut = tl.load(rec + 3 * C * BK + vv[:, None] * C + i[None, :]).to(tl.float32)
        k = load_rows(k_ptr, (token * H + h) * K, inside, d, K).to(tl.float32)
        if L2NORM:
            k *= rnorm(k, 1)[:, None]
        a_exp = load_gate_rate(a_log_ptr, hv)
        later = i[None, :] > i[:, None]  # the steps (columns) between a row and the checkpoint
        if FAMILY == SCALAR:
            here = inside
            bias = load_scalar_bias(bias_ptr, hv)
        else:
            here = inside[:, None] & (d < K)[None, :]
            bias = load_gate_bias(bias_ptr, hv, d, K, BK)
        raw = load_gate(g_ptr, token * HV + hv, inside, d, K, FAMILY, GATE)
        steps = gate_decay(raw, here, a_exp, bias, lower_bound, GATE, True, False, ASM)
        if FAMILY == SCALAR:
            k *= exp2(tl.sum(tl.where(later, steps[None, :], 0.0), 1), ASM)[:, None]
            decay = exp2(tl.sum(steps, 0), ASM)
        else:
            steps = step_operand(steps, DOT)
            k *= exp2(sum_steps(later, steps, DOT), ASM)
            decay = exp2(tl.sum(steps.to(tl.float32), 0), ASM)[None, :]
        r = ut - mma(s, tl.trans(w), DOT)
        s = mma_acc(tl.where(inside[None, :], r, 0.0), k, s * decay, DOT)
    real = (vv < V)[:, None] & (d < K)[None, :]
    at = goal * target_row + hv * target_h + pool_cell(d, vv, TARGET_K, TARGET_V, BK, BVP)
    tl.store(pool_ptr + at, s.to(pool_ptr.dtype.element_ty), mask=real)
