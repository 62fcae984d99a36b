"""Several tokens a sequence go to the backend that was measured to be faster, with the shipped H200 table."""

from __future__ import annotations

import dataclasses

import pytest

from kdacore.dispatch import cost
from kdacore.types import Device, Request, TensorSpec
from kdacore_cuda import costs, make_backend


def call(
    T: int,
    B: int,
    v_first: bool = False,
    state: str = "float32",
    g: str = "bfloat16",
    head_gate: bool = False,
) -> Request:
    op = "fused_recurrent_gated_delta_rule" if head_gate else "fused_recurrent_kda"
    shape = (B, T, 32) if head_gate else (B, T, 32, 128)
    return Request(
        op, "torch", Device("cuda", 0, "sm_90"), B, T, 32, 32, 128, 128, B, "bfloat16", state,
        tensors=(("g", TensorSpec(shape, g)),), scalar_gate=head_gate, state_v_first=v_first,
    )  # fmt: skip


def ours_and_triton(request: Request) -> tuple[float, float]:
    ours, triton = costs.recurrent(request), cost.predict("triton", request)
    assert ours is not None
    assert triton is not None
    return ours, triton


def test_one_token_costs_what_the_table_says() -> None:
    for B in (1, 8, 32, 256):
        assert costs.recurrent(call(1, B)) == cost.predict("cuda", call(1, B))


@pytest.mark.parametrize(("v_first", "state"), list(costs.SEVERAL_TOKENS))
@pytest.mark.parametrize(("T", "B"), [(4, 32), (16, 8)])
def test_several_tokens_go_where_they_are_faster(v_first: bool, state: str, T: int, B: int) -> None:
    ours, triton = ours_and_triton(call(T, B, v_first, state))
    assert (ours < triton) == (v_first and state == "float32")


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("B", [1, 8, 32, 256])
def test_one_gate_a_head_without_a_pool_goes_to_triton(B: int, v_first: bool) -> None:
    """It was chosen for its rank before: the table has no row of that op."""
    ours, triton = ours_and_triton(call(1, B, v_first, head_gate=True))
    assert ours > triton


def test_one_gate_per_head_has_a_kernel_for_single_tokens() -> None:
    pooled = dataclasses.replace(call(1, 32, head_gate=True), state_indices_ndim=1, pool_size=64)
    assert ours_and_triton(pooled) == ours_and_triton(call(1, 32))


@pytest.mark.parametrize(("v_first", "state"), list(costs.FLOAT32_G))
def test_a_float32_gate_input_goes_where_it_is_faster(v_first: bool, state: str) -> None:
    """V first with a float32 state the two are level: within 1% of each other."""
    ours, triton = ours_and_triton(call(1, 32, v_first, state, g="float32"))
    assert ours == pytest.approx(triton, rel=0.01) if v_first and state == "float32" else ours > triton


def test_far_from_everything_measured_nothing_is_predicted() -> None:
    assert costs.recurrent(call(1, 4096)) is None


def test_the_backend_declares_it() -> None:
    for op in ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule"):
        cost = make_backend().ops[op].cost
        assert cost is not None
        assert cost(call(4, 8)) == costs.recurrent(call(4, 8)) is not None
