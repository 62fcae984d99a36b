"""The gate, beta's sigmoid and the l2norm of q and k, with their gradients; and the op
``kda_gate``.

All arithmetic is float32. Each token is independent of the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kdacore.types import GateGrads, GateInputs, Request
from kdacore_pallas.gate_rates import SHRINK, gate_rate, held, held_as, rate_sigmoid, rate_softplus
from kdacore_pallas.xla.numerics import F32, mesh_axes, required, summed_like, total, varying

Array = Any
L2NORM_EPS = 1e-6
BLOCK = 64
"""Tokens summed at once."""
_CHANNELS = 2.0**-16
"""What terms are multiplied by before the sum over channels, for the reason given at SHRINK."""


def log_decay(request: Request, g: Array, A: Array | None, bias: Array | None) -> Array:
    """Natural-log decay from raw ``g``. ``A`` (A_log) and ``bias`` broadcast against ``g``; all
    float32."""
    if request.gate == "log":
        return g
    x = g if bias is None else g + held(bias)
    if request.gate == "softplus":
        return held(-rate_softplus(gate_rate(A), x))
    return request.lower_bound * jax.nn.sigmoid(x if A is None else gate_rate(A) * held(x))


class LogDecayGrads(NamedTuple):
    g: Array
    """Gradient of the raw gate, which is also that of the bias before summing over tokens."""
    A_log: Array | None
    """Same shape; to be summed over tokens and channels."""


def log_decay_backward(
    request: Request, g: Array, A: Array | None, bias: Array | None, dlog: Array
) -> LogDecayGrads:
    """Backward of :func:`log_decay`, recomputed from its inputs."""
    if request.gate == "log":
        return LogDecayGrads(dlog, None)
    x = g if bias is None else g + held(bias)
    if request.gate == "softplus":
        rate = gate_rate(A)
        dx, dA = rate_sigmoid(rate, x), held(rate_softplus(rate, x))
        return LogDecayGrads(held(-dlog * dx), held(-dlog * dA))
    x = held(x)
    slope = 1.0 if A is None else gate_rate(A)
    y = jax.nn.sigmoid(slope * x)
    # The rate is multiplied by what may be 0 first.
    dx = held(y * (1.0 - y) * slope * (dlog * required(request.lower_bound)))
    return LogDecayGrads(dx, None if A is None else dx * x)


def beta_forward(request: Request, beta: Array) -> Array:
    """The delta rule's beta, after its sigmoid where the call asks for one; float32."""
    if not request.beta_sigmoid:
        return beta
    return (2.0 if request.neg_eigval else 1.0) * jax.nn.sigmoid(beta)


def beta_backward(request: Request, beta: Array, d: Array) -> Array:
    if not request.beta_sigmoid:
        return d
    y = jax.nn.sigmoid(beta)
    return d * (2.0 if request.neg_eigval else 1.0) * y * (1.0 - y)


def inverse_norm(x: Array) -> Array:
    """``1 / sqrt(sum(x*x) + 1e-6)`` over the last axis, kept as one; float32."""
    x = x.astype(F32)
    return jax.lax.rsqrt(total(x * x, -1) + L2NORM_EPS)


def qk_l2norm(x: Array) -> Array:
    """``x / sqrt(sum(x*x) + 1e-6)`` over the last axis."""
    return x * inverse_norm(x)


def qk_l2norm_backward(x: Array, d: Array) -> Array:
    r = inverse_norm(x)
    y = x * r
    return r * (d - y * total(d * y, -1))


def _gate_params(request: Request, inputs: GateInputs) -> tuple[Array, Array | None, Array | None]:
    g = inputs.g.astype(F32)
    HV = g.shape[2]
    A = None if inputs.A_log is None else inputs.A_log.astype(F32).reshape(HV, *[1] * (g.ndim - 3))
    bias = None if inputs.dt_bias is None else inputs.dt_bias.astype(F32).reshape(g.shape[2:])
    return g, A, bias


def kda_gate(request: Request, inputs: GateInputs) -> Array:
    """Log decay ``[B, T, HV, K]`` float32 of a raw gate."""
    return log_decay(request, *_gate_params(request, inputs))


def _token_sum(x: Array) -> Array:
    """Sum of ``[B, T, ...]`` over batch and tokens times SHRINK, in an order that appended tokens do not change.

    Blocks of fixed size are added one after another: the compiler's order for a single sum depends
    on its length.
    """
    B, T = x.shape[:2]
    n = -(-T // BLOCK)
    x = jnp.pad(x * SHRINK, [(0, 0), (0, n * BLOCK - T), *[(0, 0)] * (x.ndim - 2)])
    blocks = jnp.moveaxis(x.reshape(B, n, BLOCK, *x.shape[2:]), 1, 0)
    start = varying(jnp.zeros(x.shape[2:], x.dtype), mesh_axes(x))
    summed: Array = jax.lax.scan(lambda so_far, rows: (so_far + jnp.sum(rows, (0, 1)), None), start, blocks)[
        0
    ]
    return summed


def kda_gate_backward(request: Request, inputs: GateInputs, dlog: Array) -> GateGrads:
    """Gradients of ``g``, ``A_log`` and ``dt_bias`` for ``dlog`` (the gradient of the log decay)."""
    g, A, bias = _gate_params(request, inputs)
    d = log_decay_backward(request, g, A, bias, dlog.astype(F32))
    dA = db = None
    if inputs.A_log is not None:
        summed = _token_sum(d.A_log) * _CHANNELS
        summed = jnp.sum(summed, axis=tuple(range(1, summed.ndim))) * (1.0 / SHRINK)
        dA = summed_like(held(summed * (1.0 / _CHANNELS)), inputs.A_log)
    if inputs.dt_bias is not None:
        summed = held(_token_sum(d.g) * (1.0 / SHRINK)).reshape(inputs.dt_bias.shape)
        db = summed_like(held_as(summed, inputs.dt_bias.dtype), inputs.dt_bias)
    return GateGrads(summed_like(held_as(d.g, inputs.g.dtype), inputs.g), dA, db)
