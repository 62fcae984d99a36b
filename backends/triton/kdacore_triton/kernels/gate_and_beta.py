"""Loads of beta and of a head's gate parameters, for the chunk forward and the stages."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import BETA_SIGMOID, BETA_TWICE_SIGMOID, gate_rate, held, sigmoid


@triton.jit
def load_beta(beta, row, inside, BETA: tl.constexpr):
    """The rates of some rows in float32 as the recurrence uses them; zero outside."""
    b = tl.load(beta + row, mask=inside, other=0.0).to(tl.float32)
    if BETA == BETA_SIGMOID:
        b = tl.where(inside, sigmoid(b), 0.0)
    elif BETA == BETA_TWICE_SIGMOID:
        b = tl.where(inside, 2.0 * sigmoid(b), 0.0)
    return b


@triton.jit
def load_gate_rate(A_log, hv):
    """``exp(A_log)`` of a head, 1 without A_log."""
    rate = 1.0
    if A_log is not None:
        rate = gate_rate(tl.load(A_log + hv))
    return rate


@triton.jit
def load_gate_bias(dt_bias, hv, d, K: tl.constexpr, KP: tl.constexpr):
    """``dt_bias`` of a head as a finite ``[1, KP]`` row, zeros without it."""
    bias = tl.zeros([1, KP], tl.float32)
    if dt_bias is not None:
        bias = held(tl.load(dt_bias + hv * K + d, mask=d < K, other=0.0).to(tl.float32))[None, :]
    return bias


@triton.jit
def load_scalar_bias(dt_bias, hv):
    """``dt_bias`` of a head with one gate, finite, 0 without it."""
    bias = 0.0
    if dt_bias is not None:
        bias = held(tl.load(dt_bias + hv).to(tl.float32))
    return bias
