"""q, k, beta and g on their way into the recurrence and their gradients on the way back, in the array API."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from kdacore.types import Array, Request
from kdacore_reference.arrays import cast

L2_EPS = 1e-6


def sigmoid(x: Array) -> Array:
    """Without overflow for either sign."""
    xp = array_namespace(x)
    # exp(80) and exp(700) are finite and 1 / (1 + them) is as good as zero.
    e = xp.exp(xp.clip(-x, max=80.0 if x.dtype == xp.float32 else 700.0))
    e += 1.0
    return 1.0 / e


def softplus(x: Array) -> Array:
    """``log(1 + exp(x))`` without overflow."""
    xp = array_namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x)) + xp.log1p(xp.exp(-xp.abs(x)))


def l2_scale(x: Array) -> Array:
    """``1 / sqrt(sum(x*x) + eps)`` over the last axis, which is kept with size 1."""
    xp = array_namespace(x)
    return 1.0 / xp.sqrt(xp.vecdot(x, x)[..., None] + L2_EPS)


def l2norm_backward(unit: Array, inverse: Array, dunit: Array) -> Array:
    """Gradient of ``x`` from that of ``unit = x * inverse``."""
    xp = array_namespace(unit)
    return inverse * (dunit - unit * xp.vecdot(unit, dunit)[..., None])


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
    x = g if bias is None else g + bias
    if request.gate == "softplus":
        y = -softplus(x)
        return y if a is None else a * y
    return sigmoid(x if a is None else a * x) * _bound(request)


def gate_backward(
    request: Request, g: Array, a: Array | None, bias: Array | None, dlog: Array
) -> tuple[Array, Array | None]:
    """Gradients of ``g`` and, element by element, of ``A_log`` (None without a gate or without ``A_log``).

    The gradient of ``dt_bias`` is the first summed over tokens, that of ``A_log`` the second summed over tokens and
    channels; the caller sums, in an order that does not depend on how many tokens follow.
    """
    if request.gate == "log":
        return dlog, None
    x = g if bias is None else g + bias
    if request.gate == "softplus":
        dx = -sigmoid(x) * dlog
        if a is None:
            return dx, None
        return a * dx, -a * softplus(x) * dlog
    s = sigmoid(x if a is None else a * x)
    dx = s * (1.0 - s) * (dlog * _bound(request))
    if a is None:
        return dx, None
    dx = a * dx
    return dx, x * dx


def gate_parameters(
    request: Request, A_log: Array | None, dt_bias: Array | None, dtype: Any
) -> tuple[Any, Any]:
    """``exp(A_log)`` as ``[HV, 1]`` and ``dt_bias`` as ``[HV, K]``, both ``[HV]`` with a scalar gate."""
    a = bias = None
    if A_log is not None:
        a = cast(A_log, dtype)
        a = array_namespace(a).exp(a)
        a = a if request.scalar_gate else a[:, None]
    if dt_bias is not None:
        bias = cast(dt_bias, dtype)
        if not request.scalar_gate:
            bias = array_namespace(bias).reshape(bias, (request.HV, -1))
    return a, bias


def _bound(request: Request) -> float:
    if request.lower_bound is None:
        raise ValueError(f"{request.op}: gate 'sigmoid' needs lower_bound in the request")
    return request.lower_bound
