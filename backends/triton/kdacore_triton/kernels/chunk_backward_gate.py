"""The gate and beta in the chunk backward: values and gradients, from the inputs as they are given."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_backward_io import load_rows, load_vector
from .common import (
    BETA_GIVEN,
    BETA_SIGMOID,
    BETA_TWICE_SIGMOID,
    GATE_LOG,
    GATE_SIGMOID,
    GATE_SOFTPLUS,
    LARGEST,
    LOG2E,
    exp2,
    held,
    held_as,
    log2_decay,
    product,
    reciprocal,
    sigmoid,
)

SHRINK = tl.constexpr(2.0**-7)
"""What a chunk's terms are multiplied by before they are added. There are at most 64."""


@triton.jit
def activated_beta(b, rows, SIZE: tl.constexpr, BETA: tl.constexpr):
    """beta as the recurrence uses it, 0 past the end."""
    if BETA == BETA_SIGMOID:
        b = sigmoid(b)
    elif BETA == BETA_TWICE_SIGMOID:
        b = 2.0 * sigmoid(b)
    return tl.where(tl.arange(0, SIZE) < rows, b, 0.0)


@triton.jit
def beta_grad(db, raw, BETA: tl.constexpr):
    """Gradient of beta as given, from the gradient of beta as used."""
    if BETA != BETA_GIVEN:
        s = sigmoid(raw)
        db *= BETA * s * (1.0 - s)
    return db


@triton.jit
def store_beta_grad(dbeta, beta, db, at, FIRST: tl.constexpr, SIZE: tl.constexpr, BETA: tl.constexpr):
    """Stores the gradient of beta as given, from that of beta as used, for SIZE rows of a chunk from FIRST on."""
    row = FIRST + tl.arange(0, SIZE)
    cell = (at.start + row) * at.HV + at.hv
    raw = tl.load(beta + cell, mask=row < at.rows, other=0.0).to(tl.float32)
    tl.store(dbeta + cell, beta_grad(db, raw, BETA).to(dbeta.dtype.element_ty), mask=row < at.rows)


@triton.jit
def gate_input(g, dt_bias, at, cols, SIZE: tl.constexpr):
    """``g + dt_bias`` as a float32 tile ``[SIZE, cols]``."""
    x = load_rows(g, at.start, at.rows, at.HV * at.K, at.hv * at.K, cols, at.K, SIZE).to(tl.float32)
    if dt_bias is not None:
        x += held(tl.load(dt_bias + at.hv * at.K + cols, mask=cols < at.K, other=0.0).to(tl.float32))[None, :]
    return x


@triton.jit
def gate_tile(g, dt_bias, at, cols, SIZE: tl.constexpr):
    """:func:`gate_input` with channels as rows: ``[cols, SIZE]``."""
    x = tl.trans(load_rows(g, at.start, at.rows, at.HV * at.K, at.hv * at.K, cols, at.K, SIZE)).to(tl.float32)
    if dt_bias is not None:
        x += held(tl.load(dt_bias + at.hv * at.K + cols, mask=cols < at.K, other=0.0).to(tl.float32))[:, None]
    return x


@triton.jit
def gate_input_scalar(g, dt_bias, at, SIZE: tl.constexpr):
    """``g + dt_bias`` of a gate with one value per head: float32 ``[SIZE]``."""
    x = load_vector(g, at.start, at.rows, at.HV, at.hv, SIZE)
    if dt_bias is not None:
        x += held(tl.load(dt_bias + at.hv).to(tl.float32))
    return x


@triton.jit
def bounded_rate(a_exp):
    """The rate of a bounded gate's exponent in base 2, negative and finite."""
    return tl.maximum(a_exp * -LOG2E, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log2_bound(lower_bound):
    """The bound of a step in log2. As a product it would become part of an fma where a step is subtracted from it, and
    differ from the bound that the step was computed with."""
    return product(lower_bound, LOG2E)


@triton.jit
def steps(x, a_exp, lower_bound, inside, GATE: tl.constexpr, ASM: tl.constexpr):
    """log2 decay of each row from ``x = g + dt_bias``, 0 where not ``inside``."""
    if GATE == GATE_SIGMOID:
        y = log2_bound(lower_bound) * reciprocal(1.0 + exp2(held(x) * bounded_rate(a_exp), ASM), ASM)
    else:
        y = log2_decay(x, a_exp, lower_bound, GATE)
    return tl.where(inside, y, 0.0)


@triton.jit
def has_gradient(step, DOT: tl.constexpr):
    """Does the gradient of a step exceed the rounding error of the sums it is computed from?

    It is at most ``2**step`` of those sums. Below this floor only rounding error is left, which the derivative of a
    steep gate would amplify. The gradient is then 0.
    """
    FLOOR: tl.constexpr = -13.75 if DOT == "bf16" or DOT == "tf32" else -30.0
    return step >= FLOOR


@triton.jit
def gate_grads(
    dstep, x, step, a_exp, lower_bound, inside, GATE: tl.constexpr, ASM: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Gradient of the raw gate, and the terms of dA_log, from the gradient of the natural-log decay.

    ``x`` is ``g + dt_bias``, ``step`` its log2 decay as :func:`steps` gives it; ``KIND``: the gradient's dtype, whose
    largest number a bounded gate's are held to. Where the unbounded gate has a gradient, its slope is at most 30.
    """
    if GATE == GATE_LOG:
        dx = dstep
    elif GATE == GATE_SOFTPLUS:
        slope = -a_exp * reciprocal(1.0 + exp2(x * -LOG2E, ASM), ASM)
        # Far below 0 the slope is the decay itself. There exp(x) may be no normal number, and a rate much larger than 1
        # make something of it.
        dx = dstep * tl.where(x < -17.0, step * (1.0 / LOG2E), slope)
    else:
        # At the bound the slope is 0 exactly: the rate may be the largest float32. Both factors are finite.
        bound = log2_bound(lower_bound)
        scale = 1.0 / bound
        slope = (step * scale) * ((bound - step) * scale)
        dx = (slope * a_exp) * (dstep * lower_bound)
        if tl.bfloat16 == KIND:
            dx = held_as(dx, KIND)
        else:
            dx = held(dx)
    dx = tl.where(inside, dx, 0.0)
    if GATE == GATE_SOFTPLUS:
        da = tl.where(inside, dstep * (step * (1.0 / LOG2E)), 0.0)
    elif GATE == GATE_SIGMOID:
        da = dx * held(x)
    else:
        da = dx
    return dx, da


@triton.jit
def gate_grad_as(dx, GATE: tl.constexpr, KIND: tl.constexpr):
    """The gradient of the raw gate for a store as KIND. Only that of float16 is still to be held."""
    if GATE == GATE_SIGMOID and tl.float16 == KIND:
        dx = held_as(dx, KIND)
    return dx


def bias_unit(gate: int) -> float:
    """What the sums of :func:`sum_bias` are times."""
    return float(SHRINK.value) if gate == GATE_SIGMOID.value else 1.0


@triton.jit
def sum_bias(dx, axis: tl.constexpr, GATE: tl.constexpr):
    """The sum over a chunk's tokens of the gradient of the raw gate.

    A bounded gate's is times :data:`SHRINK`: its largest gradients add up to no infinity, and the sums of two chunks
    may have different signs.
    """
    if GATE == GATE_SIGMOID:
        dx *= SHRINK
    return tl.sum(dx, axis)
