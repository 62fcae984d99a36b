"""The gate, beta's sigmoid and the l2norm of q and k, with their gradients; and the op
``kda_gate``."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.types import Array, GateGrads, GateInputs, Request
from kdacore_reference.arrays import (
    cast,
    compute_dtype,
    fold_sum,
    namespace,
    overflow_to_inf,
    plain,
    store,
    without_float_errors,
)

L2NORM_EPS = 1e-6
LARGEST = float(np.finfo(np.float32).max)
"""What ``exp(A_log)``, log decays and the gate's gradients are held to, in float64 too."""
_SMALLEST_RATE = float(np.finfo(np.float32).tiny)
_LARGEST_OF = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
SHRINK = 2.0**-24
"""Factor of the terms of sums over tokens, so that the largest of them do not overflow."""


def one_plus_exp(x: Array) -> Array:
    """Overwrites ``x``. Infinity on overflow, whose inverse 0 is the right sigmoid."""
    with overflow_to_inf(x):
        x = store(x, ..., namespace(x).exp, x)
    x += 1.0
    return x


def sigmoid(x: Array) -> Array:
    return 1.0 / one_plus_exp(-x)


def softplus(x: Array) -> Array:
    """``log(1 + exp(x))`` without overflow."""
    xp = namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x)) + xp.log1p(xp.exp(-xp.abs(x)))


def held(x: Array, largest: float = LARGEST) -> Array:
    """``x`` with at most ``largest`` in size; NaN stays."""
    return namespace(x).clip(x, -largest, largest)


def held_as(x: Array, dtype: Any) -> Array:
    """``x`` as ``dtype``, where it is finite or NaN."""
    largest = _LARGEST_OF.get(str(dtype).rpartition(".")[2], LARGEST)
    return cast(held(x, largest), dtype)


def _rate_times(a: Array, x: Array, log1p: bool) -> Array:
    """``a softplus(x)``, or ``a sigmoid(x)``; perhaps infinite.

    Where ``exp(x)`` is no normal float32 a large rate still makes something of it: of its root, twice.
    """
    xp = namespace(x)
    x = xp.clip(x, max=LARGEST)  # a rate of 0 times this is 0
    root = xp.exp(-0.5 * xp.abs(x))
    low = (a * root) * root
    if log1p:
        high = a * (xp.where(x > 0, x, xp.zeros_like(x)) + xp.log1p(root * root))
    else:
        high = a * sigmoid(x)
    return xp.where(x < -17.0, low, high)


def qk_l2norm_scale(x: Array) -> Array:
    """``1 / sqrt(sum(x*x) + eps)`` over the last axis, which is kept with size 1."""
    xp = namespace(x)
    return 1.0 / xp.sqrt(xp.vecdot(x, x)[..., None] + L2NORM_EPS)


def qk_l2norm_backward(y: Array, factor: Array, inverse_length: Array, dy: Array) -> Array:
    """Gradient of ``x`` from ``dy``, which it overwrites; ``y = x * factor`` has the norm
    ``1 / inverse_length``."""
    xp = namespace(y)
    # One factor after the other: the square of a small length may underflow.
    dy -= y * (xp.vecdot(y, dy)[..., None] * inverse_length * inverse_length)
    dy *= factor
    return dy


def beta_forward(beta: Array, request: Request) -> Array:
    if not request.beta_sigmoid:
        return beta
    return sigmoid(beta) * (2.0 if request.neg_eigval else 1.0)


def beta_backward(beta: Array, dbeta: Array, request: Request) -> Array:
    if not request.beta_sigmoid:
        return dbeta
    s = sigmoid(beta)
    return dbeta * (s * (1.0 - s) * (2.0 if request.neg_eigval else 1.0))


def gate_forward(request: Request, g: Array, a: Array | None, bias: Array | None) -> Array:
    """Natural-log decay from ``g`` ``[..., HV, K]``, or ``[..., HV]`` with a scalar gate.

    Args:
        request: names the gate and its ``lower_bound``.
        g: raw gate in the compute dtype.
        a: ``exp(A_log)``, broadcasting against ``g``; None means 1.
        bias: ``dt_bias``, broadcasting against ``g``; None means 0.
    """
    if request.gate == "log":
        return g
    with overflow_to_inf(g):
        x = g if bias is None else g + bias
        if request.gate == "softplus":
            return held(-(softplus(x) if a is None else _rate_times(a, x, log1p=True)))
        return _bound(request) / one_plus_exp(-x if a is None else held(x) * -a)


def gate_backward(
    request: Request, g: Array, a: Array | None, bias: Array | None, log_decay: Array, dlog: Array
) -> tuple[Array, Array | None]:
    """Gradients of ``g`` and, element by element, of ``A_log`` (None without a gate or without
    ``A_log``).

    ``log_decay`` is what :func:`gate_forward` gave and ``dlog`` its gradient. The gradient of
    ``dt_bias`` is the first result summed over tokens, that of ``A_log`` the second summed over
    tokens and channels. The caller sums, in an order that does not depend on how many tokens
    follow.
    """
    if request.gate == "log":
        return dlog, None
    with overflow_to_inf(g):
        x = g if bias is None else g + bias
        if request.gate == "softplus":
            dx = sigmoid(x) if a is None else _rate_times(a, x, log1p=False)
            dx = held(dx * -dlog)
            return dx, None if a is None else held(log_decay * dlog)
        # The derivative of bound * s, where s is the sigmoid, is bound * s * (1 - s).
        dx = log_decay * (-1.0 / _bound(request))
        dx += 1.0
        dx *= log_decay
        dx *= dlog
        if a is None:
            return dx, None
        dx = held(dx * a)
        return dx, held(x) * dx


def gate_parameters(
    request: Request, A_log: Array | None, dt_bias: Array | None, dtype: Any
) -> tuple[Any, Any]:
    """``exp(A_log)`` as ``[HV, 1]`` and ``dt_bias`` as ``[HV, K]``, both ``[HV]`` with a scalar
    gate; both finite, and the former 0 where it is no normal float32."""
    a = bias = None
    if A_log is not None:
        a = cast(A_log, dtype)
        xp = namespace(a)
        with overflow_to_inf(a):
            a = xp.clip(xp.exp(a), max=LARGEST)
        a = xp.where(a < _SMALLEST_RATE, xp.zeros_like(a), a)
        a = a if request.scalar_gate else a[:, None]
    if dt_bias is not None:
        bias = held(cast(dt_bias, dtype))
        if not request.scalar_gate:
            bias = namespace(bias).reshape(bias, (request.HV, -1))
    return a, bias


def base_rows(request: Request) -> int:
    """Rows over which it is safe to divide by a decay: a power of two, 1 for a gate without a small
    bound.

    The decay over them is at least ``exp(-80)`` for keys of norm 1 and ``exp(-40)`` for others, so
    that neither it nor a key divided by it comes near the ends of single precision.
    """
    if request.gate != "sigmoid":
        return 1
    most = 80.0 if request.qk_l2norm else 40.0
    rows = 16
    while rows > 1 and -rows * _bound(request) > most:
        rows //= 2
    return rows


def _bound(request: Request) -> float:
    if request.lower_bound is None:
        raise ValueError(f"{request.op}: gate 'sigmoid' needs lower_bound in the request")
    return request.lower_bound


@without_float_errors
def kda_gate_forward(request: Request, inputs: GateInputs) -> Array:
    """Natural-log decay, shaped like ``g``, float32 (float64 for float64 inputs)."""
    xp = namespace(inputs.g)
    dtype = compute_dtype(xp, request)
    parameters = gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype)
    log_decay = gate_forward(request, cast(inputs.g, dtype), *parameters)
    return xp.asarray(log_decay, copy=True) if log_decay is inputs.g else log_decay


@without_float_errors
def kda_gate_backward(request: Request, inputs: GateInputs, dlog: Array) -> GateGrads:
    """Gradients of ``g``, ``A_log`` and ``dt_bias``, each shaped and typed like its input."""
    xp = namespace(inputs.g)
    dtype = compute_dtype(xp, request)
    parameters = gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype)
    g = cast(inputs.g, dtype)
    log_decay = gate_forward(request, g, *parameters)
    dg, dA = gate_backward(request, g, *parameters, log_decay, cast(dlog, dtype))
    A_log, bias = inputs.A_log, inputs.dt_bias
    if dA is not None and not request.scalar_gate:
        dA = xp.sum(dA * _CHANNELS, axis=-1)
    return GateGrads(
        g=held_as(dg, plain(inputs.g).dtype),
        A_log=None if A_log is None else _total(dA, A_log, 1.0 if request.scalar_gate else _CHANNELS),
        dt_bias=None if bias is None else _total(dg, bias),
    )


_CHANNELS = 2.0**-16
"""What terms are multiplied by before the sum over channels, for the reason given at SHRINK."""


def _total(per_token: Array, like: Array, factor: float = 1.0) -> Array:
    """The sum over batch and tokens, in an order that later tokens without a gradient do not
    change. ``factor``: what the terms have been multiplied by."""
    xp = namespace(per_token)
    scaled = per_token * SHRINK
    summed = fold_sum(fold_sum(xp.permute_dims(scaled, (1, 0, *range(2, scaled.ndim)))))
    with overflow_to_inf(summed):
        summed = summed * (1.0 / SHRINK / factor)
    return held_as(xp.reshape(summed, like.shape), like.dtype)
