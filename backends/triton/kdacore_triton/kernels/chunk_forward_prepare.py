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
from .common import (
    FAMILY_BOUNDED,
    FAMILY_SCALAR,
    GATE_LOG,
    chunk_of_slot,
    exp2,
    gate_decay,
    mma,
    operand,
    rnorm,
)
from .gate_and_beta import load_beta, load_gate_bias, load_gate_rate, load_scalar_bias
from .groups import Inputs, Records
from .pack_tail import first_row_past, store_zero_rows
from .step_sums import step_operand
from .triangular_inverse import unit_lower_inverse


@triton.jit
def load_gate(g, row, inside, d, K: tl.constexpr, FAMILY: tl.constexpr, GATE: tl.constexpr):
    """Raw gates in float32; past the end a value that gives no decay, so that no mask is needed afterwards."""
    NONE: tl.constexpr = 0.0 if GATE == GATE_LOG else float("-inf")
    if FAMILY == FAMILY_SCALAR:
        x = tl.load(g + row, mask=inside, other=NONE)
    else:
        at = (row * K)[:, None] + d[None, :]
        x = tl.load(g + at, mask=inside[:, None] & (d < K)[None, :], other=NONE)
    return x.to(tl.float32)


@triton.jit
def load_rows(x, row, inside, d, K: tl.constexpr):
    """The channels ``d`` of rows at the offsets ``row``, in the dtype of x; 0 past the end and past K."""
    return tl.load(x + row[:, None] + d[None, :], mask=inside[:, None] & (d < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_forward_prepare_kernel(
    inputs: Inputs, levels, records: Records, o, T, NT, N, H, HV, scale, lower_bound, offset,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, FAMILY: tl.constexpr, GATE: tl.constexpr, L2NORM: tl.constexpr, BETA: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: slots * HV. ``BV``: channels of v per block; ``C = 2^LEVELS``.

    ``offset`` (FAMILY_BOUNDED): an integer near half of C steps at the bound, in log2. With FAMILY_SCALAR, g is
    ``[tokens, HV]``, dt_bias ``[HV]`` and decay one number a record. ``o``: the output, whose rows behind a pack the
    programs without a chunk set to zero; then the grid has one slot more. None where they must stay as they are.
    """
    pid = tl.program_id(0)
    slot = pid // HV
    hv = (pid - slot * HV).to(tl.int64)
    h = hv // (HV // H)
    start, rows = chunk_of_slot(inputs.cu_seqlens, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        if PACKED and o is not None:
            past = first_row_past(inputs.cu_seqlens, N, slot, C)
            store_zero_rows(o, past, T, HV * V, hv * V, V, VP, C)
        return

    i = tl.arange(0, C)
    d = tl.arange(0, KP)
    u = tl.arange(0, BV)
    inside = i < rows
    token = start + i
    row = token * HV + hv
    qk_row = (token * H + h) * K
    a_exp = load_gate_rate(inputs.A_log, hv)
    if FAMILY == FAMILY_SCALAR:
        bias = load_scalar_bias(inputs.dt_bias, hv)
    else:
        bias = load_gate_bias(inputs.dt_bias, hv, d, K, KP)
    raw = load_gate(inputs.g, row, inside, d, K, FAMILY, GATE)
    k = load_rows(inputs.k, qk_row, inside, d, K).to(tl.float32)
    q = load_rows(inputs.q, qk_row, inside, d, K).to(tl.float32)
    beta = load_beta(inputs.beta, row, inside, BETA)
    v = load_rows(inputs.v, row * V, inside, u, V)

    tile = pid.to(tl.int64)
    if L2NORM:
        k *= rnorm(k, 1)[:, None]
        q *= (rnorm(q, 1) * scale)[:, None]
    else:
        q *= scale
    if FAMILY == FAMILY_SCALAR:
        steps = gate_decay(raw, inside, a_exp, bias, lower_bound, GATE, True, False, ASM)
        total = tl.sum(steps, 0)
        tl.store(records.decay + tile, tl.exp2(total))
        aqk, akk, qg, kg, kw = scalar_products(q, k, beta, steps, total, i, DOT, ASM)
    else:
        COARSE: tl.constexpr = DOT == "bf16" or DOT == "tf32"
        tile_inside = inside[:, None] & (d < K)[None, :]
        steps = gate_decay(
            raw, tile_inside, a_exp, bias, lower_bound, GATE, FAMILY != FAMILY_BOUNDED, COARSE, ASM
        )
        steps = step_operand(steps, DOT)
        total = tl.sum(steps.to(tl.float32), 0)
        tl.store(records.decay + tile * KP + d, exp2(total, ASM))
        if FAMILY == FAMILY_BOUNDED:
            aqk, akk, qg, kg, kw = bounded_products(q, k, beta, steps, total, i, offset, DOT, ASM)
        else:
            aqk, akk, qg, kg, kw = unbounded_products(q, k, beta, steps, i, levels, C, LEVELS, DOT, ASM)

    rec = records.tiles + tile * (C * (3 * KP + VP + C))
    kind = records.tiles.dtype.element_ty
    at = i[:, None] * KP + d[None, :]
    tl.store(rec + C * KP + at, qg.to(kind))
    tl.store(rec + 2 * C * KP + at, kg.to(kind))
    kw = operand(kw, DOT)
    aqk = tl.where(i[:, None] >= i[None, :], aqk, 0.0)
    tl.store(rec + C * (3 * KP + VP) + i[:, None] * C + i[None, :], aqk.to(kind))
    low = tl.where(i[:, None] > i[None, :], akk * beta[:, None], 0.0)
    inverse = unit_lower_inverse(low, i, INV_DOT, LEVELS)
    tl.store(rec + at, mma(operand(inverse, DOT), kw, DOT).to(kind))
    by_beta = operand(inverse * beta[None, :], DOT)
    for c0 in tl.static_range(0, VP, BV):
        if c0 > 0:
            v = load_rows(inputs.v, row * V, inside, c0 + u, V)
        ut = mma(by_beta, operand(v, DOT), DOT)
        tl.store(rec + 3 * C * KP + (c0 + u)[None, :] * C + i[:, None], ut.to(kind))
