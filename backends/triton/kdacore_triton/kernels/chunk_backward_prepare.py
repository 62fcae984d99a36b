"""Launch 1 of 3 of the chunk backward, any gate: everything of a chunk that needs no state.

Grid: one program per chunk and value head. With ``gc`` the log2 decay summed from the chunk's first
row, it writes chunk-major tiles, which the later launches read whole and without masks::

    Aqk  [C, C]   scale * q_i . (k_j 2^(gc_i - gc_j)), j <= i
    inv  [C, C]   (I + tril(beta_i k_i . (k_j 2^(gc_i - gc_j)), -1))^-1
    qg   [C, KP]  scale * q 2^gc            kg [C, KP]  k 2^(gc_last - gc)
    w    [C, KP]  inv @ (beta k 2^gc)       uT [VP, C]  (inv @ (beta v))^T
    last [KP]     2^gc_last                 row_values  beta and the reciprocal norms of q and k, C each

Steps of one program: beta and norms; per block of channels the decayed q and k and their products;
the inverse; w and u. A gate with one value per channel takes its products level by level
(:func:`channel_products`), a gate with one value per head takes plain products and scales them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_gate import activated_beta, gate_input, gate_input_scalar, steps
from .chunk_backward_io import ROW_BETA, ROW_RK, ROW_RQ, load_rows, load_vector, reciprocal_norms
from .chunk_backward_sums import split_bf16, sum_rows
from .chunk_backward_w_u import store_w_u
from .common import chunk_of_program, exp2, mma, mma_acc, operand
from .gate_and_beta import load_gate_rate
from .groups import Inputs, Place, PreparedTiles
from .triangular_inverse import pairs_of, unit_lower_inverse_masked


@triton.jit
def channel_products(
    qt, kt, hi, lo, Aq, Ak, C: tl.constexpr, LEVELS: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Adds ``sum_d q_id k_jd 2^(gc_id - gc_jd)`` to Aq and ``sum_d k_id k_jd 2^(gc_id - gc_jd)`` to Ak, ``i > j``."""
    r = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    for level in range(LEVELS):
        last = ((r >> (level + 1)) << (level + 1)) + (1 << level) - 1
        f = exp2(sum_rows(((t > last) & (t <= r)) | ((t > r) & (t <= last)), hi, lo, DOT), ASM)
        kf = operand(kt * f, DOT)
        kT = tl.trans(kf)
        pairs = pairs_of(level, C)
        Aq += tl.where(pairs, mma(operand(qt * f, DOT), kT, DOT), 0.0)
        Ak += tl.where(pairs, mma(kf, kT, DOT), 0.0)
    return Aq, Ak


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def chunk_backward_prepare_kernel(
    inputs: Inputs, tiles: PreparedTiles, last, row_values,
    scale, lower_bound, T, NT, N, H, HV, K, V,
    KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, SCALAR_GATE: tl.constexpr,
    L2NORM: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr,
    DOT: tl.constexpr, INV_DOT: tl.constexpr, ASM: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``(slots * HV,)``. ``C = 2^LEVELS``."""
    pid, hv, start, rows = chunk_of_program(inputs.cu_seqlens, N, T, NT, HV, C, PACKED)
    if rows <= 0:
        return
    h = hv // (HV // H)
    at = Place(start, rows, H, h, HV, hv, K, V)
    tile = pid.to(tl.int64) * C
    r = tl.arange(0, C)
    qk_stride = H * K
    i = r[:, None]
    j = r[None, :]

    b = activated_beta(load_vector(inputs.beta, start, rows, HV, hv, C), rows, C, BETA)
    row_values += pid.to(tl.int64) * ROWS
    tl.store(row_values + ROW_BETA * C + r, b)
    a_exp = load_gate_rate(inputs.A_log, hv)
    rq = tl.full([C], 1.0, tl.float32)
    rk = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        rq, rk = reciprocal_norms(inputs.q, inputs.k, at, KP, BK, C)
        tl.store(row_values + ROW_RQ * C + r, rq)
        tl.store(row_values + ROW_RK * C + r, rk)
    if SCALAR_GATE:
        x = gate_input_scalar(inputs.g, inputs.dt_bias, at, C)
        gc = tl.cumsum(steps(x, a_exp, lower_bound, r < rows, GATE, ASM), 0)
        total = tl.min(gc, 0)
        tl.store(last + pid, tl.exp2(total))

    Aq = tl.zeros([C, C], tl.float32)
    Ak = tl.zeros([C, C], tl.float32)
    diagonal = tl.zeros([C], tl.float32)
    for first in range(0, KP, BK):
        cols = first + tl.arange(0, BK)
        qt = load_rows(inputs.q, start, rows, qk_stride, h * K, cols, K, C).to(tl.float32) * rq[:, None]
        kt = load_rows(inputs.k, start, rows, qk_stride, h * K, cols, K, C).to(tl.float32) * rk[:, None]
        diagonal += tl.sum(qt * kt, 1)
        if SCALAR_GATE:
            kT = tl.trans(kt)
            Aq = mma_acc(qt, kT, Aq, DOT)
            Ak = mma_acc(kt, kT, Ak, DOT)
            down = tl.exp2(gc)[:, None]
            rest = tl.exp2(total - gc)[:, None]
        else:
            x = gate_input(inputs.g, inputs.dt_bias, at, cols, C)
            inside = (r < rows)[:, None] & (cols < K)[None, :]
            step = steps(x, a_exp, lower_bound, inside, GATE, ASM)
            total = tl.sum(step, 0)
            tl.store(last + pid.to(tl.int64) * KP + cols, tl.exp2(total))
            hi, lo = split_bf16(step, DOT)
            down = exp2(sum_rows(r[None, :] <= r[:, None], hi, lo, DOT), ASM)
            rest = exp2(sum_rows(r[None, :] > r[:, None], hi, lo, DOT), ASM)
        wide = (tile + r)[:, None] * KP + cols[None, :]
        tl.store(tiles.qg + wide, (scale * (qt * down)).to(tiles.qg.dtype.element_ty))
        tl.store(tiles.kg + wide, (kt * rest).to(tiles.kg.dtype.element_ty))
        # w holds beta k 2^gc until the inverse is known.
        tl.store(tiles.w + wide, (b[:, None] * kt * down).to(tiles.w.dtype.element_ty))
        if not SCALAR_GATE:
            Aq, Ak = channel_products(qt, kt, hi, lo, Aq, Ak, C, LEVELS, DOT, ASM)

    if SCALAR_GATE:
        decay = tl.exp2(tl.minimum(gc[:, None] - gc[None, :], 0.0))
        Aq = tl.where(i > j, Aq * decay, 0.0)
        Ak = tl.where(i > j, Ak * decay, 0.0)
    Aq = scale * (Aq + tl.where(i == j, diagonal[:, None], 0.0))
    square = (tile + i) * C + j
    tl.store(tiles.Aqk + square, Aq.to(tiles.Aqk.dtype.element_ty))
    M = unit_lower_inverse_masked(b[:, None] * Ak, LEVELS, C, INV_DOT).to(tiles.inv.dtype.element_ty)
    tl.store(tiles.inv + square, M)

    tl.debug_barrier()
    store_w_u(M, tiles, inputs.v, b, pid.to(tl.int64), at, KP, VP, BK, BV, C, DOT)
