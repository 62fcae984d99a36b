"""Device functions of the chunk backward: decays inside one chunk as products of factors that never exceed 1.

A pair of rows ``i > j`` of a 64-row chunk belongs to exactly one *level* l in 0..5: both lie in one group of
``2 * 2**l`` rows, j in its left half, i in its right half. With the *boundary* b, the last row of that left half,

    2^(gc_i - gc_j) = 2^(gc_i - gc_b) * 2^(gc_b - gc_j),        j <= b < i.

Neither exponent is positive, so nothing overflows however strong the gate, and no row after i takes part. One factor
a row and level serves both roles: as a right row it decays from the boundary, as a left row to it. Sums of steps
are products with a 0/1 matrix, which the matrix unit does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, exp2, log2_decay, log2_decay_grad, reciprocal, sigmoid

C = tl.constexpr(64)
"""Rows of a chunk."""
LEVELS = tl.constexpr(6)
"""Halves of 1, 2, 4, ... 32 rows."""
BLOCK_LEVEL = tl.constexpr(4)
BLOCK = tl.constexpr(16)
"""Rows that one anchor serves where a gate is bounded: the levels below BLOCK_LEVEL."""


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
def boundary(r, level):
    """The last row of the left half of row r's group."""
    return ((r >> (level + 1)) << (level + 1)) + (1 << level) - 1


@triton.jit
def boundary_factor(hi, lo, level, DOT: tl.constexpr, ASM: tl.constexpr):
    """Every row's decay from or to its boundary, ``[C, BK]``; ``hi, lo`` are the halves of the steps."""
    r = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    b = boundary(r, level)
    return exp2(sum_rows(((t > b) & (t <= r)) | ((t > r) & (t <= b)), hi, lo, DOT), ASM)


@triton.jit
def level_pairs(level):
    """``[C, C]`` mask of the pairs ``i > j`` of a level."""
    half = tl.arange(0, C) >> level
    sibling = tl.where((half & 1) == 1, half ^ 1, -1)
    return sibling[:, None] == half[None, :]


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
def load_rows(x, start, rows, row_stride, first, cols, width):
    """float32 tile ``x[start + r, first + cols]``; 0 for rows past the sequence's end and columns past ``width``."""
    r = tl.arange(0, C)
    at = r[:, None] * row_stride + cols[None, :]
    inside = (r < rows)[:, None] & (cols < width)[None, :]
    return tl.load(x + start * row_stride + first + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(x, value, start, rows, row_stride, first, cols, width):
    """Inverse of :func:`load_rows`, rounded to the array's dtype."""
    r = tl.arange(0, C)
    at = r[:, None] * row_stride + cols[None, :]
    inside = (r < rows)[:, None] & (cols < width)[None, :]
    tl.store(x + start * row_stride + first + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_vector(x, start, rows, row_stride, first):
    """float32 vector ``x[start + r, first]``; 0 past the sequence's end."""
    r = tl.arange(0, C)
    return tl.load(x + start * row_stride + first + r * row_stride, mask=r < rows, other=0.0).to(tl.float32)


@triton.jit
def store_vector(x, value, start, rows, row_stride, first):
    """Inverse of :func:`load_vector`."""
    r = tl.arange(0, C)
    at = start * row_stride + first + r * row_stride
    tl.store(x + at, value.to(x.dtype.element_ty), mask=r < rows)


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
def steps(x, a_exp, lower_bound, inside, GATE: tl.constexpr, ASM: tl.constexpr):
    """log2 decay of each row from ``x = g + dt_bias``, 0 where not ``inside``."""
    if GATE == 2:
        y = (lower_bound * LOG2E) * reciprocal(1.0 + exp2(x * (a_exp * -LOG2E), ASM), ASM)
    else:
        y = log2_decay(x, a_exp, lower_bound, GATE)
    return tl.where(inside, y, 0.0)


@triton.jit
def gate_back(dstep, x, a_exp, lower_bound, inside, GATE: tl.constexpr, ASM: tl.constexpr):
    """Gradient of the raw gate, and what to add up for dA_log, from the gradient of the natural-log decay."""
    dx = tl.where(inside, dstep * log2_decay_grad(x, a_exp, lower_bound, GATE), 0.0)
    if GATE == 1:
        da = dstep * (steps(x, a_exp, lower_bound, inside, GATE, ASM) / LOG2E)
    else:
        da = dx * x
    return dx, da


@triton.jit
def beta_back(db, raw, BETA: tl.constexpr):
    """Gradient of beta as given, from the gradient of beta as used."""
    if BETA != 0:
        s = sigmoid(raw)
        db *= BETA * s * (1.0 - s)
    return db
