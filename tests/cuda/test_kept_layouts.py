"""Launches that are kept by the layout of a call's arrays: found again, and not without end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_calls import BOUNDED_MODEL, Draw, request_of
from program_launches import launches_of
from stages_calls import Drawn, stage_request

from kdacore.types import RecurrentInputs
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms import torch_forward
from kdacore_cuda.forms.recurrent.forward import RECURRENT
from kdacore_cuda.forms.stages import forward as stages
from kdacore_cuda.forms.stages import launches as stage_launches
from kdacore_cuda.forms.torch_forward import Layout, calls_of
from kdacore_cuda.runtime import device_figures, executor, torch_launch
from kdacore_cuda.runtime.program import Program

pytestmark = pytest.mark.quick

Made = tuple[str, dict[str, Any]]
"""A launch: name and parameters of its kernel."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """What is launched on Hopper; nothing runs."""
    found: list[Made] = []

    def start_of(program: Program, arch: str, index: int) -> Any:
        def start(stream: int, values: bytes) -> None:
            for step, _, packed in launches_of(program, values):
                params = step.launcher.params
                named = dict(zip(params.offsets, params.packer.unpack(packed), strict=True))
                found.append((step.launcher.kernel.name, named))

        return start

    monkeypatch.setattr(executor, "start_of", start_of)
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch_launch, "current_device", lambda: -1)
    monkeypatch.setattr(torch_launch, "current_stream", lambda index: 0)
    return found


def test_decoding(launched: list[Made]) -> None:
    d = Draw()
    x = RecurrentInputs(*(d.normal(2, 1, 2, 64) for _ in range(4)), d.normal(2, 1, 2), A_log=torch.zeros(2))
    x = x._replace(initial_state=torch.zeros(4, 2, 64, 64), state_indices=torch.tensor([0, 3]))
    request = request_of("fused_recurrent_kda", x, inplace_state=True, **BOUNDED_MODEL)
    calls, row = calls_of(request), 2 * 64 * 64

    def launch(layout: Layout) -> Made:
        call = calls.call(RECURRENT, layout)
        assert calls.call(RECURRENT, layout) is call
        launched.clear()
        assert call(tuple(x)) is not None
        (made,) = launched
        return made

    plain = calls.contiguous
    kernel, params = launch(plain)
    assert kernel.endswith(f"MODE{RecurrentMode.ONE_TOKEN:d}")
    assert (params["h0_row"], params["ht_row"]) == (row, row)
    twice = tuple(2 * s for s in plain.strides)
    for other in (plain._replace(aligned_states=False), plain._replace(strides=twice)):
        kernel, params = launch(other)
        assert kernel.endswith("MODE0") and params["q_sb"] == other.strides[0]
    for i in range(200):
        kernel, params = launch(plain._replace(rows=(row + i, row + 2 * i)))
        assert kernel.endswith(f"MODE{RecurrentMode.ONE_TOKEN:d}")
        assert (params["h0_row"], params["ht_row"]) == (row + i, row + 2 * i)
        assert len(calls._calls) <= torch_forward._MAX_LAYOUTS


@pytest.mark.parametrize("op", stage_launches.ARRAYS)
def test_stages(launched: list[Made], op: str) -> None:
    drawn = Drawn(70)
    inputs = drawn.intra() if op == "kda_chunk_intra" else drawn.recompute(False)
    r = stage_request(op, inputs)
    count, names = 3 * len(stage_launches.ARRAYS[op].strided), stage_launches._stride_names(op)
    for i in range(200):
        strides = tuple(range(i, i + count))
        views = [
            torch.empty(4096).as_strided((2, 2, 2, 1), (*strides[j : j + 3], 1)) for j in range(0, count, 3)
        ]
        launched.clear()
        stages._run(r, {}, tuple(views))
        found = stages._packed(r)[strides]
        stages._run(r, {}, tuple(views))
        assert stages._packed(r)[strides] is found
        assert [tuple(params[name] for name in names) for _, params in launched] == [strides] * 2
        assert len(stages._packed(r)) <= stages._MAX_LAYOUTS
    if op == "kda_recompute_w_u":  # q is absent, and its strides are those of k
        contiguous = stage_launches.launches_of(r).numbers
        assert contiguous["q_st"] == contiguous["k_st"]
