"""The gate and its gradients, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdacore.oracle.host_values import F64, to_float64
from kdacore.types import GateGrads, GateInputs, Request

LARGEST = float(np.finfo(np.float32).max)
"""What ``exp(A_log)``, log decays and the gate's gradients are held to."""
_SMALLEST_RATE = float(np.finfo(np.float32).tiny)
"""The smallest normal float32: an ``exp(A_log)`` below it is 0, as in arithmetic that flushes
subnormal numbers."""


def sigmoid(x: F64) -> F64:
    """The logistic function, without overflow for either sign."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def oracle_gate(request: Request, inputs: Any) -> F64:
    """Natural-log decay, shaped like ``g``. ``inputs`` is anything with ``g``, ``A_log`` and
    ``dt_bias``."""
    return gate_forward(request, *_gate_arrays(inputs))


def oracle_gate_backward(request: Request, inputs: Any, dlog: Any) -> GateGrads:
    """Gradients of the gate from the gradient of the log decay."""
    grads = gate_backward(request, *_gate_arrays(inputs), to_float64(dlog))
    bias = grads.dt_bias
    if bias is not None:
        bias = bias.reshape(np.shape(inputs.dt_bias))
    return GateGrads(grads.g, grads.A_log, bias)


def _gate_arrays(inputs: GateInputs | Any) -> tuple[F64, F64 | None, F64 | None]:
    A_log, dt_bias = (None if a is None else to_float64(a) for a in (inputs.A_log, inputs.dt_bias))
    return to_float64(inputs.g), A_log, dt_bias


def gate_forward(request: Request, g: F64, A_log: F64 | None, dt_bias: F64 | None) -> F64:
    """The contract's gate, section 1. ``g`` is ``[..., HV, K]``, or ``[..., HV]`` with a scalar
    gate. Log decays below ``-LARGEST`` are ``-LARGEST``, also those that are given."""
    if request.gate == "log":
        return np.maximum(g, -LARGEST)
    x, a = _gate_terms(request, g, A_log, dt_bias)
    if request.gate == "softplus":
        with np.errstate(invalid="ignore"):  # NumPy warns of a NaN here, which is passed on
            softplus = np.logaddexp(0.0, x)
        return np.maximum(-_times_rate(a, softplus), -LARGEST)
    return np.asarray(_bound(request) * sigmoid(_times_rate(a, x)))


def gate_backward(request: Request, g: F64, A_log: F64 | None, dt_bias: F64 | None, dlog: F64) -> GateGrads:
    """Gradients of the gate's inputs, held to ``LARGEST`` in size: each element of ``g``'s, then the
    sums of ``A_log`` and ``dt_bias``. A rate or a log decay that is held passes its gradient on."""
    if request.gate == "log":
        return GateGrads(dlog)
    x, a = _gate_terms(request, g, A_log, dt_bias)
    if request.gate == "softplus":
        dx = -a * sigmoid(x) * dlog
        dA_log = gate_forward(request, g, A_log, dt_bias) * dlog
    else:
        z = _times_rate(a, x)
        s = sigmoid(z)
        # A gate that is all the way open has slope 0, not exp(-z): no float32 backend has such a number.
        slope = _bound(request) * s * (1.0 - s) * dlog
        # Beyond the clip the slope is 0 and the product with it too.
        dx, dA_log = slope * a, slope * np.clip(z, -LARGEST, LARGEST)
    dx, dA_log = _held(dx), _held(dA_log)
    heads = tuple(range(g.ndim - (1 if request.scalar_gate else 2)))
    channels = () if request.scalar_gate else (g.ndim - 1,)
    return GateGrads(
        g=dx,
        A_log=None if A_log is None else _held(dA_log.sum(heads + channels)),
        dt_bias=None if dt_bias is None else _held(dx.sum(heads)),
    )


def _held(gradient: F64) -> F64:
    return np.clip(gradient, -LARGEST, LARGEST)


def _times_rate(a: F64, x: F64) -> F64:
    """``a * x``, and 0 for a rate of 0 whatever ``x`` is, but NaN where that is NaN."""
    finite = np.clip(x, -LARGEST, LARGEST)
    with np.errstate(over="ignore"):
        return np.asarray(a * np.where(a == 0.0, finite, x))


def _gate_terms(request: Request, g: F64, A_log: F64 | None, dt_bias: F64 | None) -> tuple[F64, F64]:
    """``x = g + dt_bias`` and ``exp(A_log)``, broadcast to ``g``.

    The rate is in [0, LARGEST], 0 where it is no normal float32. The bias is finite, so that an
    infinite ``g`` decides.
    """
    head_shape = g.shape[-1:] if request.scalar_gate else g.shape[-2:]
    x = g if dt_bias is None else g + np.clip(dt_bias, -LARGEST, LARGEST).reshape(head_shape)
    if A_log is None:
        return x, np.ones(())
    a = np.minimum(np.exp(np.minimum(A_log, 100.0)), LARGEST)
    a = np.where(a < _SMALLEST_RATE, 0.0, a)
    return x, a if request.scalar_gate else a[:, None]


def _bound(request: Request) -> float:
    if request.lower_bound is None:
        raise ValueError(f"{request.op}: gate 'sigmoid' needs lower_bound in the request")
    return request.lower_bound
