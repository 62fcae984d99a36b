"""Device functions of the chunk backward: decays inside one chunk as products of factors that never exceed 1.

A pair of rows ``i > j`` of a 64-row chunk belongs to exactly one *level* h in (32, 16, 8, 4, 2, 1): both lie in one
group of 2h rows, j in its left half, i in its right half. With the *boundary* b, the last row of that left half,

    2^(gc_i - gc_j) = 2^(gc_i - gc_b) * 2^(gc_b - gc_j),        j <= b < i.

Both exponents are sums of steps (never differences of long sums) and never positive, so nothing overflows however
strong the gate, and no row after i takes part. One factor a row and level serves both roles: as a right row it
decays from the boundary, as a left row to it. The sums are products with a 0/1 matrix, which the matrix unit does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import log2_decay, sigmoid

C = tl.constexpr(64)
"""Rows of a chunk."""
LEVELS = tl.constexpr(6)
BOUNDED_LEVELS = tl.constexpr(2)
"""Levels 32 and 16; below them a bounded gate lets one anchor a 16-row block do."""
BLOCK = tl.constexpr(16)


@triton.jit
def halves(x, DOT: tl.constexpr):
    """``x`` as a sum of two bfloat16 parts (17 bits), or ``x`` itself where dots take float32."""
    if DOT == "bf16":
        hi = x.to(tl.bfloat16)
        lo = (x - hi.to(tl.float32)).to(tl.bfloat16)
    else:
        hi = x
        lo = x
    return hi, lo


@triton.jit
def sum_rows(which, hi, lo, DOT: tl.constexpr):
    """``out[r] = sum of x[t] over the rows t with which[r, t]``; ``hi, lo = halves(x)``."""
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
def to_boundary(h):
    """``[C, C]`` mask: the steps between row r and its boundary at level h."""
    r = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    b = (r // (2 * h)) * (2 * h) + h - 1
    return ((t > b) & (t <= r)) | ((t > r) & (t <= b))


@triton.jit
def right_rows(h):
    """``[C]`` mask: rows in the right half of their group at level h."""
    return (tl.arange(0, C) // h) % 2 == 1


@triton.jit
def level_pairs(h):
    """``[C, C]`` mask of the pairs ``i > j`` of level h."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // (2 * h) == j // (2 * h)) & ((i // h) % 2 == 1) & ((j // h) % 2 == 0)


@triton.jit
def block_pairs():
    """``[C, C]`` mask of the pairs ``i > j`` in one block of BLOCK rows."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // BLOCK == j // BLOCK) & (i > j)


@triton.jit
def block_prefix():
    """``[C, C]`` mask: the steps from the block's first row to row r, both included."""
    r = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    return (r // BLOCK == t // BLOCK) & (t <= r)


@triton.jit
def up_to_row():
    """``[C, C]`` mask: rows t <= r."""
    return tl.arange(0, C)[None, :] <= tl.arange(0, C)[:, None]


@triton.jit
def after_row():
    """``[C, C]`` mask: rows t > r."""
    return tl.arange(0, C)[None, :] > tl.arange(0, C)[:, None]


@triton.jit
def load_rows(x, start, rows, row_stride, first, cols, width):
    """float32 tile ``x[start + r, first + cols]``; 0 for rows past the sequence's end and columns past ``width``."""
    r = tl.arange(0, C)
    at = (start + r)[:, None] * row_stride + first + cols[None, :]
    return tl.load(x + at, mask=(r < rows)[:, None] & (cols < width)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_vector(x, start, rows, row_stride, first):
    """float32 vector ``x[start + r, first]``; 0 past the sequence's end."""
    r = tl.arange(0, C)
    return tl.load(x + (start + r) * row_stride + first, mask=r < rows, other=0.0).to(tl.float32)


@triton.jit
def activated_beta(b, rows, BETA: tl.constexpr):
    """beta as the recurrence uses it, 0 past the end. BETA 0: given; 1: sigmoid; 2: twice the sigmoid."""
    if BETA == 1:
        b = sigmoid(b)
    elif BETA == 2:
        b = 2.0 * sigmoid(b)
    return tl.where(tl.arange(0, C) < rows, b, 0.0)


@triton.jit
def gate_input(g, dt_bias, start, rows, HV, hv, cols, K, HAS_BIAS: tl.constexpr):
    """``g + dt_bias`` as a float32 tile ``[C, cols]``."""
    x = load_rows(g, start, rows, HV * K, hv * K, cols, K)
    if HAS_BIAS:
        x += tl.load(dt_bias + hv * K + cols, mask=cols < K, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def gate_input_scalar(g, dt_bias, start, rows, HV, hv, HAS_BIAS: tl.constexpr):
    """``g + dt_bias`` of a gate with one value a head: float32 ``[C]``."""
    x = load_vector(g, start, rows, HV, hv)
    if HAS_BIAS:
        x += tl.load(dt_bias + hv).to(tl.float32)
    return x


@triton.jit
def gate_rate(A_log, hv, HAS_A: tl.constexpr):
    """``exp(A_log)`` of the head, 1 without A_log."""
    a = 1.0
    if HAS_A:
        a = tl.exp(tl.load(A_log + hv).to(tl.float32))
    return a


@triton.jit
def steps(x, a_exp, lower_bound, inside, GATE: tl.constexpr):
    """log2 decay of each row, 0 where not ``inside``."""
    return tl.where(inside, log2_decay(x, a_exp, lower_bound, GATE), 0.0)
