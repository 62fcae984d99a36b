"""One launch for all the work of a chunk that does not depend on the state.

One program per (chunk, value head): gate and running sums, l2norm, the two intra-chunk matrices, the triangular
inverse, and the rows that the scan multiplies with the state. What it writes is in :mod:`kdacore_triton.forward`.

Channels go by in blocks, so that few registers are live and many programs share a multiprocessor: the phases of one
hide behind another's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kdacore_triton.kernels.common import chunk_of_slot, mma, operand
from kdacore_triton.kernels.inverse import unit_lower_inverse
from kdacore_triton.kernels.prepare_heads import bounded_head, dyadic_head, scalar_head
from kdacore_triton.kernels.rows import load_beta, load_gate_rate

BOUNDED = tl.constexpr(0)
DYADIC = tl.constexpr(1)
SCALAR = tl.constexpr(2)


@triton.jit(do_not_specialize=["T", "NT", "N", "H", "HV"])
def prepare_kernel(
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
    T,
    NT,
    N,
    H,
    HV,
    scale,
    lower_bound,
    anchor,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
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
    """Grid: slots * HV. ``BS``, ``BU``: channels of k and of v a block; ``C = 2^LEVELS``. ``anchor`` (BOUNDED): an
    integer near half of C steps at the bound, in log2. With SCALAR, g is ``[tokens, HV]``, dt_bias ``[HV]`` and decay
    one number per record."""
    pid = tl.program_id(0)
    slot = pid // HV
    hv = (pid - slot * HV).to(tl.int64)
    h = hv // (HV // H)
    start, rows = chunk_of_slot(cu_ptr, slot, N, T, NT, C, PACKED)
    if rows <= 0:
        return

    i = tl.arange(0, C)
    inside = i < rows
    token = start + i
    tile = pid.to(tl.int64)
    rec = rec_ptr + tile * (C * (3 * BK + BV + C))
    kind = rec_ptr.dtype.element_ty
    a_exp = load_gate_rate(a_log_ptr, hv)
    beta = load_beta(beta_ptr, token, inside, hv, HV, BETA_SIGMOID, BETA_FACTOR)
    qk_row = (token * H + h) * K
    v_row = (token * HV + hv) * V
    if FAMILY == SCALAR:
        aqk, akk = scalar_head(
            q_ptr, k_ptr, g_ptr, bias_ptr, rec, decay_ptr + tile, qk_row, token * HV + hv, inside, beta, a_exp, hv,
            scale, lower_bound, K, BK, BS, C, GATE, L2NORM, DOT, ASM,
        )  # fmt: skip
    elif FAMILY == BOUNDED:
        aqk, akk = bounded_head(
            q_ptr, k_ptr, g_ptr, bias_ptr, rec, decay_ptr + tile * BK, qk_row, (token * HV + hv) * K, inside, beta,
            a_exp, hv, scale, lower_bound, anchor, K, BK, BS, C, GATE, L2NORM, DOT, ASM,
        )  # fmt: skip
    else:
        aqk, akk = dyadic_head(
            q_ptr, k_ptr, g_ptr, bias_ptr, levels_ptr, rec, decay_ptr + tile * BK, qk_row, (token * HV + hv) * K,
            inside, beta, a_exp, hv, scale, lower_bound, K, BK, BS, C, LEVELS, GATE, L2NORM, DOT, ASM,
        )  # fmt: skip

    aqk = tl.where(i[:, None] >= i[None, :], aqk, 0.0)
    tl.store(rec + C * (3 * BK + BV) + i[:, None] * C + i[None, :], aqk.to(kind))
    low = tl.where(i[:, None] > i[None, :], akk * beta[:, None], 0.0)
    inverse = unit_lower_inverse(low, i, INV_DOT, LEVELS)
    by_beta = operand(inverse * beta[None, :], DOT)
    inverse = operand(inverse, DOT)

    tl.debug_barrier()  # beta k 2^gc was stored by other threads than will load it
    for d0 in tl.range(0, BK, BS):
        out = 2 * C * BK + i[:, None] * BK + (d0 + tl.arange(0, BS))[None, :]
        w = mma(inverse, tl.load(rec + out), DOT)
        tl.debug_barrier()
        tl.store(rec + out, w.to(kind))
    for d0 in tl.range(0, BV, BU):
        c = d0 + tl.arange(0, BU)
        v = tl.load(v_ptr + v_row[:, None] + c[None, :], mask=inside[:, None] & (c < V)[None, :], other=0.0)
        u = mma(by_beta, operand(v, DOT), DOT)
        tl.store(rec + 3 * C * BK + c[None, :] * C + i[:, None], u.to(kind))
