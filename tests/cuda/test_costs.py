"""Several tokens a sequence go to the backend that was measured to be faster, with the shipped H200 table."""

from __future__ import annotations

import pytest

from kdacore import profile
from kdacore.types import Device, Request
from kdacore_cuda import costs
from kdacore_cuda.plugin import make_backend


def call(T: int, B: int, v_first: bool = False, state: str = "float32", HV: int = 32) -> Request:
    return Request(
        "fused_recurrent_kda", "torch", Device("cuda", 0, "sm_90"), B, T, HV, HV, 128, 128, B, "bfloat16", state,
        state_v_first=v_first,
    )  # fmt: skip


def test_one_token_costs_what_the_table_says() -> None:
    for B in (1, 8, 32, 256):
        assert costs.recurrent(call(1, B)) == profile.predict("cuda", call(1, B))


@pytest.mark.parametrize(("v_first", "state"), list(costs.SEVERAL_TOKENS))
@pytest.mark.parametrize(("T", "B"), [(4, 32), (16, 8)])
def test_several_tokens_go_where_they_are_faster(v_first: bool, state: str, T: int, B: int) -> None:
    request = call(T, B, v_first, state)
    ours, triton = costs.recurrent(request), profile.predict("triton", request)
    assert ours is not None
    assert triton is not None
    assert (ours < triton) == (v_first and state == "float32")


def test_far_from_everything_measured_nothing_is_predicted() -> None:
    assert costs.recurrent(call(1, 4096)) is None


def test_the_backend_declares_it() -> None:
    assert make_backend().ops["fused_recurrent_kda"].cost is costs.recurrent
