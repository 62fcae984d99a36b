"""Stage ``kda_chunk_gate``: log2 decays summed from each chunk's first row."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    GATE_LOG,
    GATE_SOFTPLUS,
    LARGEST,
    LOG2E,
    at_least,
    chunk_of_slot,
    held,
    rate_softplus,
    sigmoid,
)
from .gate_and_beta import load_gate_bias, load_gate_rate


@triton.jit(do_not_specialize=["T", "NT", "N", "HV"])
def chunk_gate_kernel(
    g, A_log, dt_bias, cu_seqlens, gc, T, NT, N, HV, lower_bound,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid: slots * HV, blocks of BK channels. Steps and sums are at least ``-LARGEST``."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = (pid - slot * HV).to(tl.int64)
    start, rows = chunk_of_slot(cu_seqlens, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return
    i = tl.arange(0, C)
    d = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (i < rows)[:, None] & (d < K)[None, :]
    at = (((start + i) * HV + hv) * K)[:, None] + d[None, :]
    x = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    if GATE == GATE_LOG:
        y = x * LOG2E
    else:
        x += load_gate_bias(dt_bias, hv, d, K, BK)
        rate = load_gate_rate(A_log, hv)
        if GATE == GATE_SOFTPLUS:
            y = rate_softplus(x, rate) * -LOG2E
        else:
            y = sigmoid(held(x) * rate) * (lower_bound * LOG2E)
    tl.store(gc + at, at_least(tl.cumsum(tl.where(inside, y, 0.0), 0), -LARGEST), mask=inside)
