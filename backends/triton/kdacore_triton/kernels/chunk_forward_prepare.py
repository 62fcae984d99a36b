"""Launch 1 of the chunk forward: all work of a chunk that does not depend on the state.

Grid: one program per chunk and value head. Steps of one program: gate and running sums, l2norm, the
two intra-chunk matrices, the triangular inverse, and the rows that the scan multiplies with the state.
The record that it writes is described in :mod:`kdacore_triton.chunk_forward`.

Latency limits it: of loads, which therefore come first, then of shuffles and products. Small chunks on
one warp are fastest: there are no barriers, and several programs share a multiprocessor and hide each
other's latency.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_forward_pair_products import bounded_products, scalar_products, unbounded_products
from .common import GATE_LOG, chunk_of_slot, exp2, gate_decay, mma, operand, rnorm
from .gate_and_beta import load_beta, load_gate_bias, load_gate_rate, load_scalar_bias
from .pack_tail import first_row_past, store_zero_rows
from .step_sums import step_operand
from .triangular_inverse import unit_lower_inverse

BOUNDED = tl.constexpr(0)
UNBOUNDED = tl.constexpr(1)
SCALAR = tl.constexpr(2)


@triton.jit
def load_gate(g_ptr, row, inside, d, K: tl.constexpr, FAMILY: tl.constexpr, GATE: tl.constexpr):
    """Raw gates in float32; past the end a value that gives no decay, so that no mask is needed afterwards."""
    NONE: tl.constexpr = 0.0 if GATE == GATE_LOG else float("-inf")
    if FAMILY == SCALAR:
        x = tl.load(g_ptr + row, mask=inside, other=NONE)
    else:
        at = (row * K)[:, None] + d[None, :]
        x = tl.load(g_ptr + at, mask=inside[:, None] & (d < K)[None, :], other=NONE)
    return x.to(tl.float32)


@triton.jit
def load_rows(ptr, row, inside, d, K: tl.constexpr):
    return tl.load(ptr + row[:, None] + d[None, :], mask=inside[:, None] & (d < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_forward_prepare_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    a_log_ptr,
    bias_ptr,
    cu_ptr,
    levels_ptr,
    rec_ptr,
    decay_ptr,
    o_ptr,
    T,
    NT,
    N,
    H,
    HV,
    scale,
    lower_bound,
    offset,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BU: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    FAMILY: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    BETA_FACTOR: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    INV_DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Grid: slots * HV. ``BU``: channels of v per block; ``C = 2^LEVELS``.

    ``offset`` (BOUNDED): an integer near half of C steps at the bound, in log2. With SCALAR, g is ``[tokens, HV]``,
    dt_bias ``[HV]`` and decay one number a record. ``o_ptr``: the output, whose rows behind a pack the programs without
    a chunk set to zero; then the grid has one slot more. None where they must stay as they are.
    """
    pid = tl.program_id(0)
    slot = pid // HV
    hv = (pid - slot * HV).to(tl.int64)
    h = hv // (HV // H)
    start, rows = chunk_of_slot(cu_ptr, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        if PACKED and o_ptr is not None:
            past = first_row_past(cu_ptr, N, slot, C)
            store_zero_rows(o_ptr, past, T, HV * V, hv * V, V, BV, C)
        return

    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    u = tl.arange(0, BU)
    inside = i < rows
    token = start + i
    row = token * HV + hv
    qk_row = (token * H + h) * K
    a_exp = load_gate_rate(a_log_ptr, hv)
    if FAMILY == SCALAR:
        bias = load_scalar_bias(bias_ptr, hv)
    else:
        bias = load_gate_bias(bias_ptr, hv, d, K, BK)
    raw = load_gate(g_ptr, row, inside, d, K, FAMILY, GATE)
    k = load_rows(k_ptr, qk_row, inside, d, K).to(tl.float32)
    q = load_rows(q_ptr, qk_row, inside, d, K).to(tl.float32)
    beta = load_beta(beta_ptr, row, inside, BETA_SIGMOID, BETA_FACTOR)
    v = load_rows(v_ptr, row * V, inside, u, V)

    tile = pid.to(tl.int64)
    if L2NORM:
        k *= rnorm(k, 1)[:, None]
        q *= (rnorm(q, 1) * scale)[:, None]
    else:
        q *= scale
    if FAMILY == SCALAR:
        steps = gate_decay(raw, inside, a_exp, bias, lower_bound, GATE, True, False, ASM)
        total = tl.sum(steps, 0)
        tl.store(decay_ptr + tile, tl.exp2(total))
        aqk, akk, qg, kg, kw = scalar_products(q, k, beta, steps, total, i, DOT, ASM)
    else:
        COARSE: tl.constexpr = DOT == "bf16" or DOT == "tf32"
        tile_inside = inside[:, None] & (d < K)[None, :]
        steps = gate_decay(raw, tile_inside, a_exp, bias, lower_bound, GATE, FAMILY != BOUNDED, COARSE, ASM)
        steps = step_operand(steps, DOT)
        total = tl.sum(steps.to(tl.float32), 0)
        tl.store(decay_ptr + tile * BK + d, exp2(total, ASM))
        if FAMILY == BOUNDED:
            aqk, akk, qg, kg, kw = bounded_products(q, k, beta, steps, total, i, offset, DOT, ASM)
        else:
            aqk, akk, qg, kg, kw = unbounded_products(q, k, beta, steps, i, levels_ptr, C, LEVELS, DOT, ASM)

    rec = rec_ptr + tile * (C * (3 * BK + BV + C))
    kind = rec_ptr.dtype.element_ty
    at = i[:, None] * BK + d[None, :]
    tl.store(rec + C * BK + at, qg.to(kind))
    tl.store(rec + 2 * C * BK + at, kg.to(kind))
    kw = operand(kw, DOT)
    aqk = tl.where(i[:, None] >= i[None, :], aqk, 0.0)
    tl.store(rec + C * (3 * BK + BV) + i[:, None] * C + i[None, :], aqk.to(kind))
    low = tl.where(i[:, None] > i[None, :], akk * beta[:, None], 0.0)
    inverse = unit_lower_inverse(low, i, INV_DOT, LEVELS)
    tl.store(rec + at, mma(operand(inverse, DOT), kw, DOT).to(kind))
    by_beta = operand(inverse * beta[None, :], DOT)
    for c0 in tl.static_range(0, BV, BU):
        if c0 > 0:
            v = load_rows(v_ptr, row * V, inside, c0 + u, V)
        ut = mma(by_beta, operand(v, DOT), DOT)
        tl.store(rec + 3 * C * BK + (c0 + u)[None, :] * C + i[:, None], ut.to(kind))
