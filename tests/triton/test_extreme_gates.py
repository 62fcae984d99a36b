"""Gates at the ends of float32 and NaN in one sequence, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from kdacore import contract
from kdacore.ops import OPS
from kdacore.oracle.gate import oracle_gate, oracle_gate_backward
from kdacore.oracle.host_values import to_float64
from kdacore.testing.cases import Case
from kdacore.testing.matrix import plan
from kdacore.testing.suite import run_case
from kdacore.types import GateInputs
from kdacore_triton import gate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = float(np.finfo(np.float32).max)
# NumPy, with which the interpreter computes, warns where the hardware does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

PICKED = (
    "chunk_kda-accuracy-still_pack",
    "chunk_kda-accuracy-steep_pack",
    "chunk_kda-gradients-cliff_sigmoid",
    "fused_recurrent_kda-accuracy-still_pack",
    "kda_chunk_gate-accuracy-steep_softplus",
    "kda_chunk_gate-accuracy-still_sigmoid",
)
MORE = (
    "kda_chunk_intra-accuracy-steep_gates",
    "fused_recurrent_gated_delta_rule-accuracy-steep_softplus",
    "chunk_gated_delta_rule-gradients-still_sigmoid",
    "chunk_kda-accuracy-steep_log",
    "chunk_kda-gradients-still_softplus",
    "chunk_kda-gradients-still_sigmoid",
    "chunk_kda-gradients-steep_softplus",
    "chunk_kda-gradients-steep_sigmoid",
    "chunk_gated_delta_rule-gradients-steep_softplus",
    "chunk_gated_delta_rule-gradients-steep_sigmoid",
    "chunk_gated_delta_rule-gradients-cliff_sigmoid",
    "fused_recurrent_kda-nan_containment-base",
    "chunk_kda-nan_containment-base",
    "chunk_kda-gradient_nan_containment-base",
)


@cache
def suite() -> dict[str, Case]:
    cases = plan("triton", device=DEVICE, level="quick", kinds=("torch",)).cases
    return {"-".join(c.id.split("-")[:3]): c for c in cases if c.dtype == cases[0].dtype}


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", [*PICKED, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in MORE)])
def test_case(name: str) -> None:
    result = run_case(suite()[name])
    assert result.status == "served", result.message


@pytest.mark.parametrize("A_log", [-np.inf, -104.5, 88.7, 100.0, np.inf])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate(A_log: float, lower_bound: float | None) -> None:
    """Every huge input with every rate, and the inputs whose exponential is no normal number."""
    x, r = gate_call([0, 1e4, -1e4, 3e38, -3e38, np.inf, -np.inf, -88.0, -100.0], A_log, lower_bound)
    np.testing.assert_allclose(to_float64(gate.forward(r, x)), oracle_gate(r, x), rtol=2e-5, atol=1e-6)
    dlog = torch.ones(x.g.shape, device=DEVICE)
    got, want = gate.backward(r, x, dlog), oracle_gate_backward(r, x, to_float64(dlog))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(to_float64(a), b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["given", "raw"])
@pytest.mark.parametrize("op", ["chunk_kda", "fused_recurrent_kda"])
def test_errors_that_numpy_was_asked_for(op: str, kind: str) -> None:
    """The interpreter computes with NumPy: an overflow there is no error. Log decays may be infinite."""
    d = torch.Generator().manual_seed(0)
    x = {n: torch.randn(1, 20, 1, 20, generator=d).to(DEVICE) for n in ("q", "k", "v", "g")}
    x["g"][:, ::3, :, ::2] = -torch.inf
    if kind == "given":
        x["g"] = -x["g"].abs()
    given = {**x, "beta": torch.full((1, 20, 1), 0.5, device=DEVICE), "use_qk_l2norm_in_kernel": True}
    if kind == "raw":
        given |= {"A_log": torch.full((1,), 100.0, device=DEVICE), "use_gate_in_kernel": True}
    with np.errstate(all="raise"):
        o = getattr(kdacore, op)(**given, backend="triton")[0]
    wanted = getattr(kdacore, op)(**given, backend="reference")[0]
    assert (o - wanted).norm() < 2e-5 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_held(dtype: torch.dtype) -> None:
    """An input of 0 has a slope of a quarter of the rate; the bias's gradient is a sum of such ones of both signs."""
    x, r = gate_call([0.0] * 5, 300.0, -5.0, dtype)
    dlog = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0], device=DEVICE).reshape(x.g.shape)
    got = gate.backward(r, x, dlog)
    most = torch.finfo(dtype).max
    assert got.g.flatten().tolist() == [-most, most, -most, most, most]
    assert got.dt_bias.item() == LARGEST
    assert got.A_log.item() == 0


def gate_call(
    g: list[float], A_log: float, lower_bound: float | None, dtype: torch.dtype = torch.float32
) -> tuple[GateInputs, Any]:
    x = GateInputs(
        torch.tensor(g, device=DEVICE).to(dtype).reshape(1, -1, 1, 1),
        torch.tensor([A_log], device=DEVICE),
        torch.zeros((1, 1), device=DEVICE),
    )
    return x, contract.build_request(OPS["kda_gate"], x, (lower_bound,))[0]


def test_gate_gradients_whose_sums_nearly_cancel() -> None:
    """The sums of two spans of tokens are larger than any float32, and their signs differ."""
    signs = [-0.2] * 16 + [0.2] * 15
    x, r = gate_call([0.0] * len(signs), 100.0, -5.0)
    dlog = torch.tensor(signs, device=DEVICE).reshape(x.g.shape)
    got, want = gate.backward(r, x, dlog), oracle_gate_backward(r, x, to_float64(dlog))
    assert 0 < abs(want.dt_bias.item()) < LARGEST
    np.testing.assert_allclose(to_float64(got.dt_bias), want.dt_bias, rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule"])
def test_sums_of_chunks_that_nearly_cancel(op: str) -> None:
    case = suite()[f"{op}-gradients-cliff_sigmoid"]
    for seed in range(2):
        result = run_case(replace(case, shape=replace(case.shape, B=1, T=150), seed=seed))
        assert result.status == "served", result.message
