"""Sums after the chunk backward's three launches: over chunks and over head groups, each in one fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import held_as, product, rnorm

SHRINK = tl.constexpr(2.0**-20)
"""What the terms of a sum over chunks are multiplied by. They are held to the largest float32: 2**20 of them add up
to no infinity."""


@triton.jit(do_not_specialize=["HV", "slots"])
def sum_slots_kernel(part, out, slots, HV, K, KP: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr):
    """``out[hv, :K] = sum over slots of part[slot, hv, :K] / UNIT``; ``part`` is ``[slots, HV, KP]``. Held to the
    largest finite number of ``out``. Grid: ``(HV,)``."""
    hv = tl.program_id(0)
    cols = tl.arange(0, KP)
    total = tl.zeros([KP], tl.float32)
    for first in range(0, slots, ROWS):
        s = first + tl.arange(0, ROWS)
        at = (s.to(tl.int64) * HV + hv)[:, None] * KP + cols[None, :]
        term = tl.load(part + at, mask=(s < slots)[:, None], other=0.0)
        total += tl.sum(product(term, SHRINK), 0)
    total = held_as(total * (1.0 / (SHRINK * UNIT)), out.dtype.element_ty)
    tl.store(out + hv * K + cols, total.to(out.dtype.element_ty), mask=cols < K)


@triton.jit(do_not_specialize=["H", "HV", "rows", "N"])
def sum_group_kernel(
    x, part, dx, cu_seqlens, rows, H, HV, K, N,
    KP: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, L2NORM: tl.constexpr,
):  # fmt: skip
    """``dx[t, h]``: the group's gradients ``part`` of ``x[t, h]`` summed. L2NORM: they are those of the normalised x.

    ``x``, ``dx``: ``[rows, H, K]``; ``part``: ``[rows, HV, K]``, which may be ``dx``. Grid: ``(ceil(rows / ROWS), H)``.
    ``cu_seqlens``: offsets of N packed sequences where x is read; rows of x behind them may hold anything.
    """
    h = tl.program_id(1)
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = tl.arange(0, KP)
    mask = (t < rows)[:, None] & (cols < K)[None, :]
    total = tl.zeros([ROWS, KP], tl.float32)
    for i in range(GROUP):
        at = (t * HV + h * GROUP + i)[:, None] * K + cols[None, :]
        total += tl.load(part + at, mask=mask, other=0.0).to(tl.float32)
    at = (t * H + h)[:, None] * K + cols[None, :]
    if L2NORM:
        if cu_seqlens is None:
            given = mask
        else:
            given = mask & (t < tl.load(cu_seqlens + N))[:, None]
        xt = tl.load(x + at, mask=given, other=0.0).to(tl.float32)
        rn = rnorm(xt, 1)
        inner = tl.sum(product(total, xt), 1) * rn * rn
        total = rn[:, None] * (total - xt * inner[:, None])
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=mask)
