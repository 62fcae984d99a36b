"""Sums of decay steps over chosen rows, on the matrix unit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_operand(g, DOT: tl.constexpr):
    """Steps (log2 decays) as the operand of :func:`sum_steps`.

    float16 keeps 11 bits: an error of 2^-12 x in an exponent x <= 0 costs at most 2^-12 / e of the factor 2^x, well
    below the rounding of other operands. Totals must be taken from the rounded steps too.
    """
    if DOT == "bf16" or DOT == "fp16" or DOT == "tf32":
        r = g.to(tl.float16)
    else:
        r = g
    return r


@triton.jit
def sum_steps(take, steps, DOT: tl.constexpr):
    """``take @ steps`` for a 0/1 matrix: exact sums, in float32, of the rows it chooses."""
    if DOT == "bf16" or DOT == "fp16" or DOT == "tf32":
        r = tl.dot(take.to(tl.float16), steps)
    else:
        r = tl.dot(take.to(tl.float32), steps, input_precision=DOT)
    return r
