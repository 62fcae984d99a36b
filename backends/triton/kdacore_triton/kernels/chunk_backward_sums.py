"""Sums over chosen tokens on the matrix unit, and the operands they take."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_bf16(x, DOT: tl.constexpr):
    """``x`` as a sum of two bfloat16 parts (17 bits), or ``x`` itself where dots take float32."""
    if DOT == "bf16":
        hi = x.to(tl.bfloat16)
        lo = (x - hi.to(tl.float32)).to(tl.bfloat16)
    else:
        hi = x
        lo = x
    return hi, lo


@triton.jit
def sum_tokens(hi, lo, which, DOT: tl.constexpr):
    """``out[:, r] = sum of x[:, t] over the t with which[t, r]``; ``hi, lo = split_bf16(x)``."""
    if DOT == "bf16":
        ones = which.to(tl.bfloat16)
        r = tl.dot(lo, ones, acc=tl.dot(hi, ones))
    elif DOT == "tf32":
        r = tl.dot(hi, which.to(tl.float32), input_precision="tf32x3")
    else:
        r = tl.dot(hi, which.to(tl.float32), input_precision=DOT)
    return r


@triton.jit
def sum_tokens_exact(x, which, DOT: tl.constexpr):
    """:func:`sum_tokens` of ``x`` itself, for sums far smaller than their terms, which need every bit of float32."""
    if DOT == "bf16":
        hi, lo = split_bf16(x, DOT)
        rest = (x - hi.to(tl.float32) - lo.to(tl.float32)).to(tl.bfloat16)
        r = tl.dot(hi, which.to(tl.bfloat16), acc=sum_tokens(lo, rest, which, DOT))
    else:
        r = sum_tokens(x, x, which, DOT)
    return r


@triton.jit
def sum_rows(which, hi, lo, DOT: tl.constexpr):
    """``out[r] = sum of x[t] over the rows t with which[r, t]``; ``hi, lo = split_bf16(x)``."""
    if DOT == "bf16":
        ones = which.to(tl.bfloat16)
        r = tl.dot(ones, hi)
        r = tl.dot(ones, lo, acc=r)
    elif DOT == "tf32":
        r = tl.dot(which.to(tl.float32), hi, input_precision="tf32x3")
    else:
        r = tl.dot(which.to(tl.float32), hi, input_precision=DOT)
    return r


@triton.jit
def rounded(x, DOT: tl.constexpr):
    """``x`` rounded as a dot of precision DOT rounds it, still float32, so that other products use the same value."""
    if DOT == "bf16":
        # To nearest, ties away from zero: two integer operations are faster than converting there and back.
        bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def tf32_rounded(x, DOT: tl.constexpr):
    """``x`` rounded to tf32 where products are tf32: nearest, ties away from zero."""
    if DOT == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -8192
        x = bits.to(tl.float32, bitcast=True)
    return x
