"""Gates at the ends of float32: what the oracle says of them, and the reference backend after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kdacore.oracle.gate import LARGEST, oracle_gate, oracle_gate_backward
from kdacore.oracle.host_values import to_float64
from kdacore.types import GateInputs
from kdacore_reference.gate import kda_gate_backward, kda_gate_forward

INF = float("inf")

LOG_DECAYS: list[tuple[str, float, float, float, float]] = [
    # gate, A_log, g, dt_bias, log decay
    ("softplus", -INF, 5.0, 0.0, 0.0),
    ("softplus", -INF, LARGEST, LARGEST, 0.0),
    ("softplus", -INF, INF, 0.0, 0.0),
    ("softplus", -200.0, 1e30, 0.0, 0.0),
    ("softplus", 88.7, 0.0, 0.0, -math.exp(88.7) * math.log(2)),
    ("softplus", 88.7, 1.0, 0.0, -math.exp(88.7) * math.log1p(math.e)),
    ("softplus", 300.0, 0.0, 0.0, -LARGEST * math.log(2)),
    ("softplus", INF, 1.0, 0.0, -LARGEST),
    ("softplus", 300.0, -88.0, 0.0, -LARGEST * math.exp(-88)),
    ("softplus", 100.0, -1e4, 0.0, 0.0),
    ("softplus", 100.0, -INF, 0.0, 0.0),
    ("softplus", 0.0, INF, -INF, -LARGEST),
    ("softplus", 0.0, 1e4, 0.0, -1e4),
    ("sigmoid", -INF, 7.0, 0.0, -2.5),
    ("sigmoid", -INF, INF, 0.0, -2.5),
    ("sigmoid", -104.5, -LARGEST, -LARGEST, -2.5),
    ("sigmoid", 300.0, 0.0, 0.0, -2.5),
    ("sigmoid", 300.0, 1e-3, 0.0, -5.0),
    ("sigmoid", INF, -1e-3, 0.0, 0.0),
    ("sigmoid", 0.0, INF, 0.0, -5.0),
    ("sigmoid", 0.0, -INF, INF, 0.0),
    ("sigmoid", 0.0, 0.0, INF, -5.0),
]


def convert(array: np.ndarray, kind: str) -> Any:
    return array if kind == "numpy" else torch.from_numpy(array)


def gate_call(make_call: Callable[..., Any], gate: str, *values: float, **options: Any) -> tuple[Any, Any]:
    """A call of ``kda_gate`` whose inputs hold these values: of ``A_log``, ``g`` and ``dt_bias``."""
    fields = {"lower_bound": -5.0} if gate == "sigmoid" else {}
    call = make_call(gate=gate, T=3, K=5, V=4, **fields, **options)
    given = (
        np.full_like(getattr(call.inputs, n), x)
        for n, x in zip(("A_log", "g", "dt_bias"), values, strict=True)
    )
    A_log, g, dt_bias = given
    return call.request, GateInputs(g=g, A_log=A_log, dt_bias=dt_bias)


@pytest.mark.parametrize(("gate", "A_log", "g", "bias", "want"), LOG_DECAYS)
def test_oracle_gate_is_finite_at_the_ends(
    gate: str, A_log: float, g: float, bias: float, want: float, make_call: Callable[..., Any]
) -> None:
    request, inputs = gate_call(make_call, gate, A_log, g, bias)
    got = oracle_gate(request, inputs)
    np.testing.assert_allclose(got, max(want, -LARGEST), rtol=1e-5)
    for x in oracle_gate_backward(request, inputs, np.ones_like(got)):
        assert np.isfinite(x).all()
        assert np.abs(x).max() <= LARGEST


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(("gate", "A_log", "g", "bias", "want"), LOG_DECAYS)
def test_gate_is_finite_at_the_ends(
    gate: str, A_log: float, g: float, bias: float, want: float, kind: str, make_call: Callable[..., Any]
) -> None:
    request, inputs = gate_call(make_call, gate, A_log, g, bias)
    x = GateInputs(*(convert(a, kind) for a in inputs))
    got = kda_gate_forward(request, x)
    np.testing.assert_allclose(to_float64(got), max(want, -LARGEST), rtol=2e-5)
    found = kda_gate_backward(request, x, got * 0 + 1)
    for a, b in zip(found, oracle_gate_backward(request, inputs, np.ones(inputs.g.shape)), strict=True):
        np.testing.assert_allclose(to_float64(a), b, rtol=2e-5)


def test_oracle_gate_gradients_are_held(make_call: Callable[..., Any]) -> None:
    """At ``x = 0`` the bounded gate's slope is a quarter of the rate, and the sums are larger still."""
    request, inputs = gate_call(make_call, "sigmoid", 300.0, 0.0, 0.0)
    grads = oracle_gate_backward(request, inputs, np.ones(inputs.g.shape))
    assert (grads.g == -LARGEST).all()
    assert (grads.dt_bias == -LARGEST).all()
    assert (grads.A_log == 0).all()


def test_oracle_slope_of_an_open_gate(make_call: Callable[..., Any]) -> None:
    """``s * (1 - s)``, as backends have it: 0 where ``s`` is 1 in float64, and exact where it is small."""
    slopes = []
    for x in (60.0, -60.0):
        request, inputs = gate_call(make_call, "sigmoid", 0.0, x, 0.0, dtype="float64")
        slopes.append(oracle_gate_backward(request, inputs, np.ones(inputs.g.shape)).g)
    assert (slopes[0] == 0).all()
    np.testing.assert_allclose(slopes[1], request.lower_bound * np.exp(-60.0), rtol=1e-12)


@pytest.mark.parametrize("gate", ["softplus", "sigmoid"])
@pytest.mark.parametrize("name", ["A_log", "g", "dt_bias"])
def test_oracle_gate_passes_nan_on(gate: str, name: str, make_call: Callable[..., Any]) -> None:
    """Only where it is read, also with a rate of 0."""
    request, inputs = gate_call(make_call, gate, -INF, 1.0, 1.0)
    spoilt = getattr(inputs, name).copy()
    spoilt[0] = np.nan
    want = np.zeros(inputs.g.shape, bool)
    want[{"A_log": np.s_[:, :, 0], "dt_bias": np.s_[:, :, 0], "g": np.s_[0]}[name]] = True
    got = oracle_gate(request, inputs._replace(**{name: spoilt}))
    assert (np.isnan(got) == want).all()
