"""beta's sigmoid and the l2norm of q and k, with their gradients, in float64."""

from __future__ import annotations

import numpy as np

from kdacore.oracle.gate import sigmoid
from kdacore.oracle.host_values import F64
from kdacore.types import Request

L2NORM_EPS = 1e-6


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
