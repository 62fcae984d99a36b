"""kda_gate and its backward against the float64 oracle."""

from typing import Any

import numpy as np
import pytest
import torch

from kdacore import contract
from kdacore.ops import OPS
from kdacore.oracle.gate import oracle_gate, oracle_gate_backward
from kdacore.oracle.host_values import to_float64
from kdacore.types import GateInputs, Request
from kdacore_triton import gate

pytestmark = pytest.mark.quick

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def request_of(inputs: GateInputs, lower_bound: float | None) -> Request:
    return contract.build_request(OPS["kda_gate"], inputs, (lower_bound,))[0]


def error(got: torch.Tensor, want: np.ndarray) -> float:
    return float(np.linalg.norm(to_float64(got) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("lower_bound", [None, -5.0, -20.0])
@pytest.mark.parametrize(
    ("shape", "dtype", "parameters"),
    [
        ((2, 37, 3, 20), torch.float32, "both"),
        ((1, 5, 40), torch.float16, "rate"),
        ((1, 300, 2, 70), torch.bfloat16, "flat bias"),
    ],
    ids=str,
)
def test_forward_and_backward(
    lower_bound: float | None, shape: tuple[int, ...], dtype: torch.dtype, parameters: str
) -> None:
    rng = torch.Generator().manual_seed(0)
    g = (4 * torch.randn(shape, generator=rng)).to(dtype)
    arrays: dict[str, Any] = {}
    if parameters != "flat bias" or lower_bound is None:
        arrays["A_log"] = torch.randn(shape[2], generator=rng)
    if parameters != "rate":
        arrays["dt_bias"] = torch.randn(shape[2:], generator=rng)
        if parameters == "flat bias":
            arrays["dt_bias"] = arrays["dt_bias"].flatten()
    x = GateInputs(*(None if a is None else a.to(DEVICE) for a in GateInputs(g, **arrays)))
    r = request_of(x, lower_bound)
    got = gate.forward(r, x)
    assert got.dtype == torch.float32
    assert error(got, oracle_gate(r, x)) <= 1e-6
    dlog = torch.randn(shape, generator=rng).to(DEVICE)
    grads, want = gate.backward(r, x, dlog), oracle_gate_backward(r, x, to_float64(dlog))
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3}[dtype]
    for name in ("g", "A_log", "dt_bias"):
        a, b = getattr(grads, name), getattr(want, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == getattr(x, name).dtype
            assert error(a, b) <= (bound if name == "g" else 5e-6)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_slow_and_fast_gates_keep_relative_accuracy(lower_bound: float | None) -> None:
    g = torch.linspace(-40, 40, 800).reshape(1, 800, 1, 1).to(DEVICE)
    x = GateInputs(g, torch.zeros(1, device=DEVICE))
    r = request_of(x, lower_bound)
    got, want = to_float64(gate.forward(r, x)), oracle_gate(r, x)
    assert np.max(np.abs(got - want) / np.abs(want)) < 3e-5


def test_strided_gate() -> None:
    g = torch.randn(1, 10, 2, 16).to(DEVICE)
    x = GateInputs(g.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(2, device=DEVICE))
    y = x._replace(g=g)
    assert torch.equal(gate.forward(request_of(x, None), x), gate.forward(request_of(y, None), y))
