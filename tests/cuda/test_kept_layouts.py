"""Launches that are kept by the layout of a call's arrays: found again, and not without end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, Draw, request_of
from stages_calls import Drawn, stage_request

from kdacore.types import RecurrentInputs
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent import launches as recurrent_launches
from kdacore_cuda.forms.recurrent import sizes as recurrent_sizes
from kdacore_cuda.forms.stages import launches as stage_launches
from kdacore_cuda.forms.stages import sizes as stage_sizes
from kdacore_cuda.runtime import device_figures, torch_launch

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)


def decode() -> Any:
    d = Draw()
    x = RecurrentInputs(*(d.normal(2, 1, 2, 64) for _ in range(4)), d.normal(2, 1, 2), A_log=torch.zeros(2))
    x = x._replace(initial_state=torch.zeros(4, 2, 64, 64), state_indices=torch.tensor([0, 3]))
    return request_of("fused_recurrent_kda", x, inplace_state=True, **BOUNDED_MODEL)


def test_decoding() -> None:
    r = decode()
    plan, row = recurrent_sizes.plan_of(r), 2 * 64 * 64
    first = recurrent_launches.sequence_of(r, plan.strides, (row, row), True)
    assert recurrent_launches.sequence_of(r, plan.strides, (row, row), True) is first
    assert first.launchers[0].launcher.kernel.name.endswith(f"MODE{RecurrentMode.ONE_TOKEN:d}")
    for strides, aligned in ((plan.strides, False), (tuple(2 * s for s in plan.strides), True)):
        other = recurrent_launches.sequence_of(r, strides, (row, row), aligned)
        assert other.launchers[0].launcher.kernel.name.endswith("MODE0")
    for i in range(200):
        made = recurrent_launches.sequence_of(r, plan.strides, (row + i, row), True)
        assert made.launches[0].fixed["h0_row"] == row + i
        assert len(plan.sequences) <= recurrent_launches._MAX_LAYOUTS


@pytest.mark.parametrize("op", stage_launches.ARRAYS)
def test_stages(op: str) -> None:
    drawn = Drawn(70)
    inputs = drawn.intra() if op == "kda_chunk_intra" else drawn.recompute(False)
    r = stage_request(op, inputs)
    contiguous = stage_launches.launch_of(r)
    count = 3 * len(stage_launches.ARRAYS[op].strided)
    for i in range(200):
        strides = tuple(range(i, i + count))
        made = stage_launches.sequence_of(r, strides)
        assert stage_launches.sequence_of(r, strides) is made
        fields = list(contiguous.fixed)[:count]
        assert tuple(made.launches[0].fixed[name] for name in fields) == strides
        assert len(stage_sizes.plan_of(r).sequences) <= stage_launches._MAX_STRIDES
    if op == "kda_recompute_w_u":  # q is absent, and its strides are those of k
        assert contiguous.fixed["q_st"] == contiguous.fixed["k_st"] and "q" not in contiguous.arrays
