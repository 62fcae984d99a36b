"""Launch 1 of 3 of the chunk backward with one constant exponent offset per half chunk; chunks of 64 rows.

Writes what chunk_backward_prepare_offset_c32 writes, with halves of S = 32 rows that are a tile each.
Grid: one program per chunk and value head. Tiles of 32 rows need few registers, so more programs
share a multiprocessor, and their products use warp-level matrix instructions. With 64 rows the
compiler chooses warp-group instructions, and ptxas 12.8 (Triton 3.6) loses the addresses of their
operands in this kernel's loops.

The inverse of a chunk from those of its halves is ``[[M0, 0], [Mx, M1]]``, ``Mx = -M1 (L10 M0)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_gate import activated_beta, gate_input, steps
from .chunk_backward_io import (
    ROW_BETA,
    ROW_RK,
    ROW_RQ,
    load_rows,
    load_vector,
    reciprocal_norms,
    store_half_decays,
)
from .chunk_backward_offset_operands import store_operands
from .common import chunk_of_program, exp2, mma
from .gate_and_beta import load_gate_rate
from .groups import Inputs, OffsetOperands, Place, PreparedTiles
from .prefetch import prefetch_inputs
from .triangular_inverse import unit_lower_inverse_masked

S = tl.constexpr(32)
C = tl.constexpr(64)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_backward_prepare_offset_c64_kernel(
    inputs: Inputs, tiles: PreparedTiles, operands: OffsetOperands, row_values,
    scale, lower_bound, floor, centre, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``. ``centre`` is an integer."""
    pid, hv, start, rows = chunk_of_program(inputs.cu_seqlens, N, T, NT, HV, C, PACKED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    at = Place(start, rows, H, h, HV, hv, K, V)
    chunk = pid.to(tl.int64)
    if ASM:
        prefetch_inputs(inputs, at, KP, VP, C)
    later = start + S
    beyond = rows - S
    late = Place(later, beyond, H, h, HV, hv, K, V)
    r = tl.arange(0, S)
    i = r[:, None]
    j = r[None, :]
    kind = operands.zb.dtype.element_ty

    b0 = activated_beta(load_vector(inputs.beta, start, rows, HV, hv, S), rows, S, BETA)
    b1 = activated_beta(load_vector(inputs.beta, later, beyond, HV, hv, S), beyond, S, BETA)
    row_values += chunk * ROWS + r
    tl.store(row_values + ROW_BETA * C, b0)
    tl.store(row_values + ROW_BETA * C + S, b1)
    a_exp = load_gate_rate(inputs.A_log, hv)
    rq0 = tl.full([S], 1.0, tl.float32)
    rq1 = tl.full([S], 1.0, tl.float32)
    rk0 = tl.full([S], 1.0, tl.float32)
    rk1 = tl.full([S], 1.0, tl.float32)
    if L2NORM:
        rq0, rk0 = reciprocal_norms(inputs.q, inputs.k, at, KP, BK, S)
        rq1, rk1 = reciprocal_norms(inputs.q, inputs.k, late, KP, BK, S)
        tl.store(row_values + ROW_RQ * C, rq0)
        tl.store(row_values + ROW_RQ * C + S, rq1)
        tl.store(row_values + ROW_RK * C, rk0)
        tl.store(row_values + ROW_RK * C + S, rk1)

    A0 = tl.zeros([S, S], tl.float32)
    A1 = tl.zeros([S, S], tl.float32)
    Ax = tl.zeros([S, S], tl.float32)
    L0 = tl.zeros([S, S], tl.float32)
    L1 = tl.zeros([S, S], tl.float32)
    Lx = tl.zeros([S, S], tl.float32)
    one = tl.full([1, BK], 1.0, tl.float32)
    upto = j <= i
    after_row = j > i
    for first in range(0, KP, BK):
        cols = first + tl.arange(0, BK)
        known = (cols < K)[None, :]
        x = gate_input(inputs.g, inputs.dt_bias, at, cols, S)
        step0 = tl.maximum(steps(x, a_exp, lower_bound, (i < rows) & known, GATE, ASM), floor)
        x = gate_input(inputs.g, inputs.dt_bias, late, cols, S)
        step1 = tl.maximum(steps(x, a_exp, lower_bound, (i < beyond) & known, GATE, ASM), floor)
        d0 = exp2(tl.sum(step0, 0), ASM)
        d1 = exp2(tl.sum(step1, 0), ASM)
        store_half_decays(operands.last, chunk, cols, d0, d1, KP)

        out = chunk * (C * KP) + i * KP + cols[None, :]
        z_q, z_b, y, s = store_operands(
            inputs, operands, tiles, step0, upto, after_row, b0, rq0, rk0, one, d1[None, :], scale, centre,
            at, cols, out, S, DOT, ASM,
        )  # fmt: skip
        y = tl.trans(y)
        A0 += mma(z_q, y, DOT)
        L0 += mma(z_b, y, DOT)
        s = tl.trans(s)
        z_q, z_b, y, _ = store_operands(
            inputs, operands, tiles, step1, upto, after_row, b1, rq1, rk1, d0[None, :], one, scale, centre,
            late, cols, out + S * KP, S, DOT, ASM,
        )  # fmt: skip
        Ax += mma(z_q, s, DOT)
        Lx += mma(z_b, s, DOT)
        y = tl.trans(y)
        A1 += mma(z_q, y, DOT)
        L1 += mma(z_b, y, DOT)

    unit = tl.exp2(-centre)
    square = chunk * (C * C) + i * C + j
    zero = tl.zeros([S, S], kind)
    tl.store(tiles.Aqk + square, tl.where(i >= j, scale * A0, 0.0).to(kind))
    tl.store(tiles.Aqk + square + S, zero)
    tl.store(tiles.Aqk + square + S * C, (scale * unit * Ax).to(kind))
    tl.store(tiles.Aqk + square + S * C + S, tl.where(i >= j, scale * A1, 0.0).to(kind))
    M0 = unit_lower_inverse_masked(tl.where(i > j, L0, 0.0), 5, S, INV_DOT)
    M1 = unit_lower_inverse_masked(tl.where(i > j, L1, 0.0), 5, S, INV_DOT)
    Mx = -mma(M1, mma(unit * Lx, M0, INV_DOT), INV_DOT)
    M0 = M0.to(kind)
    M1 = M1.to(kind)
    Mx = Mx.to(kind)
    tl.store(tiles.inv + square, M0)
    tl.store(tiles.inv + square + S, zero)
    tl.store(tiles.inv + square + S * C, Mx)
    tl.store(tiles.inv + square + S * C + S, M1)

    tl.debug_barrier()
    for first in range(0, KP, BK):
        out = tiles.w + chunk * (C * KP) + i * KP + first + tl.arange(0, BK)[None, :]
        kb0 = tl.load(out)
        kb1 = tl.load(out + S * KP)
        w0 = mma(M0, kb0, DOT)
        w1 = mma(Mx, kb0, DOT) + mma(M1, kb1, DOT)
        tl.debug_barrier()
        tl.store(out, w0.to(kind))
        tl.store(out + S * KP, w1.to(kind))
    M0 = tl.trans(M0)
    M1 = tl.trans(M1)
    Mx = tl.trans(Mx)
    for first in range(0, VP, BV):
        cols = first + tl.arange(0, BV)
        vb0 = load_rows(inputs.v, start, rows, HV * V, hv * V, cols, V, S).to(tl.float32) * b0[:, None]
        vb1 = load_rows(inputs.v, later, beyond, HV * V, hv * V, cols, V, S).to(tl.float32) * b1[:, None]
        vb0 = tl.trans(vb0.to(kind))
        vb1 = tl.trans(vb1.to(kind))
        out = tiles.uT + chunk * (VP * C) + cols[:, None] * C + j
        tl.store(out, mma(vb0, M0, DOT).to(kind))
        tl.store(out + S, (mma(vb0, Mx, DOT) + mma(vb1, M1, DOT)).to(kind))
