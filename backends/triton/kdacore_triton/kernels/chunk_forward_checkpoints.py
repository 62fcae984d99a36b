"""After the scan: checkpoints that lie inside a chunk of more than 16 rows, from the state at the chunk's start.

With the first ``m`` rows of a chunk that starts from S, and the records that the prepare kernel wrote::

    v' = ut^T - w S         S_m = 2^(gc_m) S + sum over i < m of k_i 2^(gc_m - gc_i) v'_i

Rows of v' do not depend on later ones. The records hold ``k_i`` decayed to the chunk's last row, so k and the gates
are read again. A checkpoint at a chunk's start is copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_forward_prepare import load_gate, load_rows
from .common import FAMILY_SCALAR, exp2, gate_decay, mma, mma_acc, rnorm, sequence_span
from .gate_and_beta import load_gate_bias, load_gate_rate, load_scalar_bias
from .groups import KeyInputs
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
    do_not_specialize_on_alignment=["state_indices", "checkpoint_offsets", "checkpoint_indices"],
)
def chunk_forward_checkpoints_kernel(
    inputs: KeyInputs, records, mids, target, state_indices, checkpoint_offsets, checkpoint_indices,
    T, NT, N, H, HV, lower_bound, target_row, target_head, null,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    FAMILY: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr,
    ASM: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Grid: checkpoints * HV * (VP // BV). ``mids``: ``[checkpoints, HV, VP, KP]`` float32, from the scan."""
    pid = tl.program_id(0)
    v0 = (pid % (VP // BV)) * BV
    nth = pid // (VP // BV) // HV
    hv = (pid // (VP // BV) - nth * HV).to(tl.int64)
    h = hv // (HV // H)
    goal = load_slot(checkpoint_indices + nth, null)
    if goal < 0:
        return
    offset = tl.load(checkpoint_offsets + nth).to(tl.int64)
    n = nth * 0
    if PACKED:
        n = sequence_of_token(inputs.cu_seqlens, N, offset) + nth * 0
    if state_indices is not None:  # noqa: SIM102  (a constexpr test, then one of values)
        if load_slot(state_indices + n, null) < 0:
            return
    bos, length, slot = sequence_span(inputs.cu_seqlens, n, T, NT, C, PACKED)
    if (offset < bos) | (offset >= bos + length):
        return
    chunk = (offset - bos) // C
    rows = (offset - bos - chunk * C).to(tl.int32)

    i = tl.arange(0, C)
    d = tl.arange(0, KP)
    vv = v0 + tl.arange(0, BV)
    s = tl.load(mids + (nth.to(tl.int64) * HV + hv) * (VP * KP) + vv[:, None] * KP + d[None, :])
    if rows > 0:
        start = bos + chunk * C
        inside = i < rows
        token = start + i
        rec = records + ((slot + chunk) * HV + hv) * (C * (3 * KP + VP + C))
        w = tl.load(rec + i[:, None] * KP + d[None, :]).to(tl.float32)
        ut = tl.load(rec + 3 * C * KP + vv[:, None] * C + i[None, :]).to(tl.float32)
        k = load_rows(inputs.k, (token * H + h) * K, inside, d, K).to(tl.float32)
        if L2NORM:
            k *= rnorm(k, 1)[:, None]
        a_exp = load_gate_rate(inputs.A_log, hv)
        later = i[None, :] > i[:, None]  # the steps (columns) between a row and the checkpoint
        if FAMILY == FAMILY_SCALAR:
            here = inside
            bias = load_scalar_bias(inputs.dt_bias, hv)
        else:
            here = inside[:, None] & (d < K)[None, :]
            bias = load_gate_bias(inputs.dt_bias, hv, d, K, KP)
        raw = load_gate(inputs.g, token * HV + hv, inside, d, K, FAMILY, GATE)
        steps = gate_decay(raw, here, a_exp, bias, lower_bound, GATE, True, False, ASM)
        if FAMILY == FAMILY_SCALAR:
            k *= exp2(tl.sum(tl.where(later, steps[None, :], 0.0), 1), ASM)[:, None]
            decay = exp2(tl.sum(steps, 0), ASM)
        else:
            steps = step_operand(steps, DOT)
            k *= exp2(sum_steps(later, steps, DOT), ASM)
            decay = exp2(tl.sum(steps.to(tl.float32), 0), ASM)[None, :]
        r = ut - mma(s, tl.trans(w), DOT)
        s = mma_acc(tl.where(inside[None, :], r, 0.0), k, s * decay, DOT)
    real = (vv < V)[:, None] & (d < K)[None, :]
    at = goal * target_row + hv * target_head + pool_cell(d, vv, POOL.target_k, POOL.target_v, KP, VP)
    tl.store(target + at, s.to(target.dtype.element_ty), mask=real)
