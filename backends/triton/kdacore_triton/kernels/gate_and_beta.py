"""Loads of beta and of a head's gate parameters, for the chunk forward and the stages."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import gate_rate, held, sigmoid


@triton.jit
def load_beta(beta_ptr, row, inside, SIGMOID: tl.constexpr, FACTOR: tl.constexpr):
    """The rates of some rows in float32: ``FACTOR * sigmoid(beta)``, or beta itself; zero outside."""
    b = tl.load(beta_ptr + row, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        b = tl.where(inside, FACTOR * sigmoid(b), 0.0)
    return b


@triton.jit
def load_gate_rate(a_log_ptr, hv):
    """``exp(A_log)`` of a head, 1 without A_log."""
    rate = 1.0
    if a_log_ptr is not None:
        rate = gate_rate(tl.load(a_log_ptr + hv))
    return rate


@triton.jit
def load_gate_bias(bias_ptr, hv, d, K: tl.constexpr, BK: tl.constexpr):
    """``dt_bias`` of a head as a finite ``[1, BK]`` row, zeros without it."""
    bias = tl.zeros([1, BK], tl.float32)
    if bias_ptr is not None:
        bias = held(tl.load(bias_ptr + hv * K + d, mask=d < K, other=0.0).to(tl.float32))[None, :]
    return bias


@triton.jit
def load_scalar_bias(bias_ptr, hv):
    """``dt_bias`` of a head with one gate, finite, 0 without it."""
    bias = 0.0
    if bias_ptr is not None:
        bias = held(tl.load(bias_ptr + hv).to(tl.float32))
    return bias
