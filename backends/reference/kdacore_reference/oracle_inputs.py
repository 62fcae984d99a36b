"""The gate, beta's sigmoid and the l2norm of q and k with their gradients, in float64."""

from __future__ import annotations

import numpy as np

from kdacore.types import GateGrads, Request
from kdacore_reference.arrays import F64

L2NORM_EPS = 1e-6


def sigmoid(x: F64) -> F64:
    """Without overflow for either sign."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def qk_l2norm_forward(x: F64) -> F64:
    return np.asarray(x / np.sqrt((x * x).sum(-1, keepdims=True) + L2NORM_EPS))


def qk_l2norm_backward(x: F64, dy: F64) -> F64:
    inverse = 1.0 / np.sqrt((x * x).sum(-1, keepdims=True) + L2NORM_EPS)
    return np.asarray(inverse * dy - x * inverse**3 * (x * dy).sum(-1, keepdims=True))


def beta_forward(beta: F64, request: Request) -> F64:
    if not request.beta_sigmoid:
        return beta
    return (2.0 if request.neg_eigval else 1.0) * sigmoid(beta)


def beta_backward(beta: F64, dbeta: F64, request: Request) -> F64:
    if not request.beta_sigmoid:
        return dbeta
    s = sigmoid(beta)
    return (2.0 if request.neg_eigval else 1.0) * dbeta * s * (1.0 - s)


def gate_forward(request: Request, g: F64, A_log: F64 | None, dt_bias: F64 | None) -> F64:
    """The contract's gate, section 1. ``g`` is ``[..., HV, K]``, or ``[..., HV]`` with a scalar
    gate."""
    if request.gate == "log":
        return g
    x, a = _gate_terms(request, g, A_log, dt_bias)
    if request.gate == "softplus":
        return np.asarray(-a * np.logaddexp(0.0, x))
    return np.asarray(_bound(request) * sigmoid(a * x))


def gate_backward(request: Request, g: F64, A_log: F64 | None, dt_bias: F64 | None, dlog: F64) -> GateGrads:
    if request.gate == "log":
        return GateGrads(dlog)
    x, a = _gate_terms(request, g, A_log, dt_bias)
    if request.gate == "softplus":
        dx = -a * sigmoid(x) * dlog
        dA_log = gate_forward(request, g, A_log, dt_bias) * dlog
    else:
        s = sigmoid(a * x)
        inner = _bound(request) * s * (1.0 - s) * dlog
        dx, dA_log = inner * a, inner * a * x
    heads = tuple(range(g.ndim - (1 if request.scalar_gate else 2)))
    channels = () if request.scalar_gate else (g.ndim - 1,)
    return GateGrads(
        g=np.asarray(dx),
        A_log=None if A_log is None else np.asarray(dA_log.sum(heads + channels)),
        dt_bias=None if dt_bias is None else np.asarray(dx.sum(heads)),
    )


def _gate_terms(request: Request, g: F64, A_log: F64 | None, dt_bias: F64 | None) -> tuple[F64, F64]:
    """``x = g + dt_bias`` and ``exp(A_log)``, broadcast to ``g``."""
    head_shape = g.shape[-1:] if request.scalar_gate else g.shape[-2:]
    x = g if dt_bias is None else g + dt_bias.reshape(head_shape)
    if A_log is None:
        return x, np.ones(())
    a = np.exp(A_log)
    return x, a if request.scalar_gate else a[:, None]


def _bound(request: Request) -> float:
    if request.lower_bound is None:
        raise ValueError(f"{request.op}: gate 'sigmoid' needs lower_bound in the request")
    return request.lower_bound
