"""Chunk calls with the GPU's roundings, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_roundings import cut_to_tf32, from_bf16, gpu_roundings, to_bf16

import kdacore
from kdacore.calls.description import options
from kdacore.calls.values import Shape
from kdacore.testing.cases import Case
from kdacore.testing.suite import Result, run_case

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU rounds by itself"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Pairs above the diagonal overflow with one exponent offset. They are masked after the product.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

FAST = Case(
    check="gradients", backend="triton", op="fused_recurrent_kda", kind="torch",
    shape=Shape(2, 7, 3, 3, 60, 100), dtype="float16",
    index_dtype="int32", gates="floor", dt_bias="", factor=2.0, seed=3144,
    options=options(output_final_state=True, use_gate_in_kernel=True),
)  # fmt: skip
"""Random call 3144: seven tokens that all decay by e^-5, in two sequences whose gradients of A_log nearly cancel."""
TF32 = Case(
    check="gradients", backend="triton", op="chunk_kda", kind="torch",
    shape=Shape(1, 26, 2, 2, 16, 16, (0, 7, 19, 0)), dtype="bfloat16",
    gate_dtype="float16", beta_dtype="bfloat16", gates="init", dt_bias="", initial_state=True, factor=2.0, seed=434,
    options=options(lower_bound=-1.0, output_final_state=True, use_gate_in_kernel=True),
)  # fmt: skip
"""Random call 434, whose products are tf32 ones."""
BF16 = Case(
    check="gradients", backend="triton", op="chunk_kda", kind="torch",
    shape=Shape(1, 104, 2, 4, 128, 60, (33, 46, 15, 10)),
    dtype="bfloat16", beta_dtype="bfloat16", gates="floor", initial_state=True, factor=2.0, seed=859,
    options=options(lower_bound=-1.0, output_final_state=True, safe_gate=True, use_qk_l2norm_in_kernel=True),
)  # fmt: skip
"""Random call 859, whose products are bfloat16 ones."""


def gradients(case: Case) -> tuple[Result, dict[str, float]]:
    """The result, and the error of each gradient."""
    with gpu_roundings():
        result = run_case(case)
    found = {f.what: f.error for f in result.findings if f.what.startswith("gradient") and f.bound}
    return result, {what.removeprefix("gradient of "): error for what, error in found.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "most"),
    [
        pytest.param(FAST, 1e-4, marks=pytest.mark.exhaustive),
        (replace(FAST, dtype="bfloat16"), 1e-4),
        (replace(FAST, op="chunk_kda"), 8e-3),
    ],
    ids=["float16", "bfloat16", "chunk"],
)
def test_gradients_of_A_log_whose_parts_nearly_cancel(case: Case, most: float) -> None:
    """With bfloat16 operands that of A_log was 2.0e-2 off (H200: 2.1e-2), where 1.6e-2 is allowed."""
    result, errors = gradients(case)
    assert result.status == "served", result.message
    assert errors["A_log"] < most, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "name", "recorded"), [(TF32, "g", 1.4546e-2), (BF16, "k", 7.2e-3)], ids=["tf32", "bf16"]
)
def test_errors_are_those_an_h200_recorded(case: Case, name: str, recorded: float) -> None:
    _, errors = gradients(case)
    assert errors[name] == pytest.approx(recorded, rel=0.05), errors


@pytest.mark.parametrize(
    ("T", "H", "HV", "K", "in_kernel"),
    [
        (512, 1, 1, 128, False),
        (256, 1, 2, 64, True),
        pytest.param(1500, 2, 2, 128, False, marks=pytest.mark.exhaustive),
    ],
)
def test_final_states_of_float16_with_one_gate_a_head(
    T: int, H: int, HV: int, K: int, in_kernel: bool
) -> None:
    """Drawn as flash-linear-attention's tests do, which allow 5e-3: all keys point to one side, gates are slow."""
    draw = torch.Generator().manual_seed(T)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw)

    q, k = (torch.nn.functional.normalize(rand(1, T, H, K), dim=-1).half() for _ in range(2))
    g = rand(1, T, HV)
    gate = {"use_gate_in_kernel": True, "A_log": torch.log(1 + 15 * rand(HV)), "dt_bias": rand(HV) - 4.0}
    x = {
        "q": q,
        "k": k,
        "v": rand(1, T, HV, K).half(),
        "beta": rand(1, T, HV).sigmoid(),
        **({"g": g.half(), **gate} if in_kernel else {"g": torch.nn.functional.logsigmoid(g) / 10}),
    }
    more = {"initial_state": torch.zeros(1, HV, K, K), "output_final_state": True, "scale": 0.1}
    want = kdacore.chunk_gated_delta_rule(**x, **more, backend="reference")
    with gpu_roundings():
        got = kdacore.chunk_gated_delta_rule(**x, **more, backend="triton")
    for found, exact in zip(got, want, strict=True):
        assert float((found.double() - exact.double()).norm() / exact.double().norm()) < 2.5e-3


def test_single_numbers() -> None:
    x = np.array([1.0, 1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), 3e-39, 0.0], np.float32)
    want = torch.from_numpy(x).to(torch.bfloat16)
    assert np.array_equal(to_bf16(x), want.view(torch.uint16).numpy())
    assert np.array_equal(from_bf16(to_bf16(x)), want.float().numpy())
    x = np.array([1 + 2**-10, 1 + 2**-11, -1 - 2**-11], np.float32)
    assert np.array_equal(cut_to_tf32(x), [1 + 2**-10, 1, -1])
