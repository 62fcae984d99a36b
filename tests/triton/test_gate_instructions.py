"""The gate with the instructions that kernels use on a GPU: single ones that flush denormals, and inexact divisions.

In the interpreter functions that flush take their place, so that what they lose shows without a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kdacore_triton.kernels import chunk_backward_gate as backward
from kdacore_triton.kernels import common

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = float(np.finfo(np.float32).max)
INPUTS = [0.0, 1.0, -3.0, -17.5, -60.0, -87.5, -88.0, -95.0, -103.5, -130.0, -3e38, 3e38, -np.inf, np.inf]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@triton.jit
def flushing_exp2(x, ASM: tl.constexpr):
    r = tl.exp2(x)
    return tl.where(r < common.SMALLEST, 0.0, r)


@triton.jit
def flushing_log2(x, ASM: tl.constexpr):
    return tl.log2(tl.where(x < common.SMALLEST, 0.0, x))


@triton.jit
def flushing_reciprocal(x, ASM: tl.constexpr):
    r = 1.0 / x
    return tl.where(r < common.SMALLEST, 0.0, r)


@triton.jit
def decay_kernel(
    x_ptr, a_ptr, out_ptr, lower_bound, GATE: tl.constexpr, COARSE: tl.constexpr, N: tl.constexpr
):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    rate = common.gate_rate(tl.load(a_ptr))
    y = common.gate_decay(x, x == x, rate, 0.0, lower_bound, GATE, True, COARSE, True)
    tl.store(out_ptr + at, y)


@triton.jit
def gradient_kernel(x_ptr, a_ptr, dx_ptr, da_ptr, lower_bound, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    rate = common.gate_rate(tl.load(a_ptr))
    step = backward.steps(x, rate, lower_bound, x == x, 2, True)
    one = tl.full([N], 1.0, tl.float32)
    dx, da = backward.gate_grads(one, x, step, rate, lower_bound, x == x, 2, True, tl.float32)
    tl.store(dx_ptr + at, dx)
    tl.store(da_ptr + at, da)


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        for module in (common, backward):
            for function in (flushing_exp2, flushing_log2, flushing_reciprocal):
                name = function.__name__.removeprefix("flushing_")
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, function)


def arrays(inputs: list[float], A_log: float) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Inputs in float32, as often as it takes to a power of two, and the logarithm of the rate."""
    x = np.resize(np.asarray(inputs, np.float32), 16)
    return x, torch.from_numpy(x).to(DEVICE), torch.tensor([A_log], device=DEVICE)


def rate_of(A_log: float) -> float:
    rate = min(float(np.exp(min(A_log, 100.0))), LARGEST)
    return rate if rate >= np.finfo(np.float32).tiny else 0.0


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("A_log", [-np.inf, -3.0, 0.0, 10.0, 16.6, 40.0, 88.7, np.inf])
def test_softplus(A_log: float, coarse: bool) -> None:
    """Every input with every rate, inputs whose exponential is no normal float32 among them."""
    x, given, rate = arrays(INPUTS, A_log)
    out = torch.empty_like(given)
    decay_kernel[(1,)](given, rate, out, -1.0, GATE=1, COARSE=coarse, N=16)  # type: ignore[index]
    held = np.clip(x.astype(np.float64), -LARGEST, LARGEST)
    want = np.maximum(-np.logaddexp(0.0, held) * rate_of(A_log) / np.log(2.0), -126.0)
    np.testing.assert_allclose(out.cpu().numpy(), want, rtol=3e-4, atol=1e-3 if coarse else 1e-6)


@pytest.mark.parametrize("A_log", [-np.inf, 0.0, 88.7, np.inf])
def test_gradients_of_bounded(A_log: float) -> None:
    """With any bound the slope of a gate at its bound is 0: the largest rate makes nothing of a rounding error."""
    bounds = [-1.0, -5.0, *np.random.default_rng(0).uniform(-8.0, -0.1, 60).astype(np.float32)]
    x, given, rate = arrays([0.0, 0.25, -1.0, 1.0, 3.0, 40.0, 3e38, np.inf], A_log)
    for bound in map(float, bounds):
        dx, da = torch.empty_like(given), torch.empty_like(given)
        gradient_kernel[(1,)](given, rate, dx, da, bound, N=16)  # type: ignore[index]
        for got, want in zip((dx, da), gradients(x, rate_of(A_log), bound), strict=True):
            np.testing.assert_allclose(got.cpu().numpy(), want, rtol=2e-5, atol=2e-6, err_msg=str(bound))


def gradients(x: np.ndarray, rate: float, bound: float) -> tuple[Any, Any]:
    """The gradient of the input and the term of dA_log, from the gradient 1 of the decay."""
    held = np.clip(x.astype(np.float64), -LARGEST, LARGEST)
    z = np.clip(rate * held, -LARGEST, LARGEST)
    with np.errstate(over="ignore"):
        slope = 1.0 / (1.0 + np.exp(-z)) / (1.0 + np.exp(z))
    dx = np.clip(bound * slope * rate, -LARGEST, LARGEST)
    return dx, np.clip(dx * held, -LARGEST, LARGEST)
