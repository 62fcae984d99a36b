"""Calls whose gate inputs lie at the ends of their types, and what such a call should give, in float64.

The expected values do not pass through the reference's gate: log decays are made here and given to the
oracle as such, and the gradients of the gate's inputs follow by the chain rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cuda_calls import BOUNDED_MODEL, MODEL, Draw, request_of
from numpy.typing import NDArray
from server_model import Expected
from server_model import expected as expected_of_pools

from kdacore.types import ChunkInputs, OutputGrads, Outputs, RecurrentInputs, Request
from kdacore_reference.oracle import oracle_backward, oracle_forward, to_float64

F64 = NDArray[np.float64]
LARGEST = float(np.finfo(np.float32).max)
BF16 = float(torch.finfo(torch.bfloat16).max)
INF = float("inf")
NOTHING = 1e-15
"""What is smaller may be lost: gradients of gates that all but end a state."""
WIDE_BOUND: dict[str, Any] = MODEL | {"lower_bound": -20.0}
"""A bound that is served by the kernels for gates without one."""
KINDS = {"bounded": BOUNDED_MODEL, "softplus": MODEL, "wide bound": WIDE_BOUND}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
LENGTHS = (0, 1, 31, 33)
"""Of a pack: no chunk of it is whole."""


def options_of(kind: str) -> dict[str, Any]:
    return KINDS[kind] | {"output_final_state": True}


class Gate(NamedTuple):
    """What a head and some of its channels get; other inputs stay as they were drawn."""

    A_log: float
    g: tuple[float, ...] = ()
    """Of the first channels, at every third token."""
    bias: tuple[float, ...] = ()
    """Of the channels from the middle on."""


EXTREMES = (-BF16, BF16, 0.0, -1e30, 1e30, -100.0, 100.0)
GATES = {
    "rate 0": Gate(-INF, (*EXTREMES, -INF, INF), (LARGEST, -LARGEST, INF, -INF)),
    "rate that underflows": Gate(-104.0, EXTREMES),
    "small rate": Gate(-80.0, EXTREMES, (1e30, -1e30)),
    "large inputs": Gate(1.0, (*EXTREMES, -INF, INF), (LARGEST, -LARGEST, 3e38, -3e38, 1e20, INF, -INF)),
    "steep": Gate(20.0, EXTREMES, (1e30, -1e30, 0.5, -0.5)),
    "largest rate": Gate(88.7, (*EXTREMES, -87.0, -88.5, -90.0, -95.0), (LARGEST, -LARGEST, 0.5)),
    "rate that overflows": Gate(100.0, EXTREMES, (LARGEST, -LARGEST, -2.0)),
    "infinite rate": Gate(INF, (*EXTREMES, -INF, INF), (1.0, -1.0)),
}
"""By what is extreme."""


SOME = tuple(GATES)


def draw(
    T: int,
    HV: int = len(GATES) + 1,
    *,
    K: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **more: Any,
) -> ChunkInputs:
    """A call whose heads have the extreme gates in turn; the last one has those of a model."""
    d = Draw(seed)
    fields = {
        "q": d.normal(1, T, HV, K),
        "k": d.normal(1, T, HV, K),
        "v": d.normal(1, T, HV, K),
        "beta": d.normal(1, T, HV),
        **d.gate("random", 1, T, HV, K),
    }
    fields["g"] = fields["g"].to(dtype)
    for head in range(HV - 1):
        gate = GATES[SOME[head % len(SOME)]]
        fields["A_log"][head] = gate.A_log
        for channel, x in enumerate(gate.g):
            fields["g"][:, ::3, head, channel] = x
        for channel, x in enumerate(gate.bias):
            fields["dt_bias"][head, K // 2 + channel] = x
            fields["g"][:, ::2, head, K // 2 + channel] = -x  # a sum of 0, or near it
    return ChunkInputs(**fields | more)


def draw_scalar(T: int, HV: int = len(GATES) + 1, seed: int = 0) -> RecurrentInputs:
    """The same with a gate a head: its extreme inputs come one token after another."""
    x = draw(T, HV, seed=seed)
    g = x.g[..., 0].clone()
    for head in range(HV - 1):
        for token, value in enumerate(GATES[SOME[head % len(SOME)]].g):
            g[:, token::9, head] = value
    bias = 0.1 * x.dt_bias[:, 3]
    bias[SOME.index("large inputs")] = -INF
    return RecurrentInputs(x.q, x.k, x.v, g, x.beta, x.A_log, bias)


def worst_heads(got: Any, want: Any, axis: int) -> dict[str, float]:
    """The error of every head, by what is extreme in it and its number; NaN and infinity stay."""
    a, b = np.moveaxis(to_float64(got), axis, 0), np.moveaxis(np.asarray(want), axis, 0)
    return {
        f"{SOME[i % len(SOME)] if i < len(a) - 1 else 'none'}, head {i}": float(
            np.linalg.norm(x - y) / max(np.linalg.norm(y), NOTHING)
        )
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    }


def beyond(bound: float, got: Any, want: Any, axis: int) -> dict[str, float]:
    """Heads whose error is not below the bound."""
    return {head: e for head, e in worst_heads(got, want, axis).items() if not e < bound}


def log_decays(request: Request, inputs: Any) -> tuple[F64, F64, F64, F64]:
    """Log decays, between -LARGEST and 0; g + dt_bias, the rate, and the derivative by g + dt_bias."""
    with np.errstate(all="ignore"):
        rate = np.minimum(np.exp(to_float64(inputs.A_log)), LARGEST)
        rate = np.where(rate < 2.0**-126, 0.0, rate)  # as float32 has no smaller normal number
        rate = rate if request.scalar_gate else rate[:, None]
        x = to_float64(inputs.g) + np.clip(to_float64(inputs.dt_bias), -LARGEST, LARGEST)
        x = np.clip(x, -1e300, 1e300)  # an infinite g decides
        if request.gate == "sigmoid":
            bound = request.lower_bound
            s = 1 / (1 + np.exp(-rate * x))
            return bound * s, x, rate, bound * rate * s * (1 / (1 + np.exp(rate * x)))
        e = np.exp(-np.abs(x))
        softplus = np.maximum(x, 0) + np.log1p(e)
        derivative = -rate * np.where(x > 0, 1 / (1 + e), e / (1 + e))
        return np.maximum(-rate * softplus, -LARGEST), x, rate, derivative


def as_log_decays(
    request: Request, inputs: Any, options: dict[str, Any], decays: F64
) -> tuple[Request, Any, dict[str, Any]]:
    """The call with log decays instead of a gate's inputs."""
    bare = inputs._replace(g=torch.from_numpy(decays.astype(np.float32)), A_log=None, dt_bias=None)
    plain = {**options, "use_gate_in_kernel": False, "safe_gate": False, "lower_bound": None}
    return request_of(request.op, bare, **plain), bare, plain


def expected(request: Request, inputs: ChunkInputs | RecurrentInputs, options: dict[str, Any]) -> Outputs:
    """Outputs and states."""
    return oracle_forward(*as_log_decays(request, inputs, options, log_decays(request, inputs)[0])[:2])


def expected_pools(request: Request, inputs: ChunkInputs, options: dict[str, Any]) -> Expected:
    """What a call with pools writes."""
    return expected_of_pools(*as_log_decays(request, inputs, options, log_decays(request, inputs)[0]))


class Gradients(NamedTuple):
    """Expected gradients, cut off at the largest float32."""

    q: F64
    k: F64
    v: F64
    g: F64
    beta: F64
    A_log: F64
    dt_bias: F64
    rate_size: F64
    """The 2-norm of what A_log's gradient is the sum of: it may be what little is left of that."""
    bias_size: F64
    """The same of dt_bias's gradient."""


def expected_gradients(
    request: Request, inputs: ChunkInputs, options: dict[str, Any], given: OutputGrads, floor: float | None
) -> Gradients:
    """``floor``: log2 decays at or below it have gradient 0 (unbounded gates)."""
    decays, x, _, derivative = log_decays(request, inputs)
    kept = decays if floor is None else np.maximum(decays, floor * np.log(2))
    want = oracle_backward(*as_log_decays(request, inputs, options, kept)[:2], given)
    d = np.asarray(want.g)
    if floor is not None:
        d = np.where(decays > floor * np.log(2), d, 0.0)

    def cut(y: F64, largest: float = LARGEST) -> F64:
        return np.clip(y, -largest, largest)

    with np.errstate(all="ignore"):
        dg = cut(np.where(d == 0, 0.0, d * derivative), float(torch.finfo(inputs.g.dtype).max))
        of_rate = dg * x if request.gate == "sigmoid" else d * decays
        of_rate = np.where(dg == 0, 0.0, cut(of_rate))
        dA, size = cut(of_rate.sum((0, 1, 3))), np.sqrt((of_rate**2).sum((0, 1, 3)))
        dbias, bias_size = cut(dg.sum((0, 1))), np.sqrt((dg**2).sum((0, 1)))
    return Gradients(want.q, want.k, want.v, dg, want.beta, dA, dbias, size, bias_size)


def assert_bias_gradient(got: Any, want: Gradients) -> None:
    """Within 3e-2 of every head, or of the size of its terms."""
    off = np.linalg.norm(to_float64(got) - want.dt_bias, axis=-1)
    size = np.linalg.norm(np.maximum(np.abs(want.dt_bias), want.bias_size), axis=-1)
    assert (off <= 3e-2 * np.maximum(size, NOTHING)).all(), off / size
