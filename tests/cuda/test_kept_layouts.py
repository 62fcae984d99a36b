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
from kdacore_cuda.forms.recurrent.forward import RECURRENT
from kdacore_cuda.forms.stages import forward as stages
from kdacore_cuda.forms.stages import launches as stage_launches
from kdacore_cuda.runtime import device_figures, executor, plan_cache, torch_launch
from kdacore_cuda.runtime.program import Program

pytestmark = pytest.mark.quick

LIMIT = 64

Made = tuple[str, dict[str, Any]]
"""A launch: name and parameters of its kernel."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """What is launched on Hopper; nothing runs."""
    found: list[Made] = []

    def start_of(program: Program, arch: str, index: int) -> Any:
        def start(stream: int, values: bytes) -> None:
            for step, _, packed in launches_of(program, values):
                params = step.kernel.params
                named = dict(zip(params.offsets, params.packer.unpack(packed), strict=True))
                found.append((step.kernel.source.name, named))

        return start

    monkeypatch.setattr(executor, "start_of", start_of)
    monkeypatch.setattr(device_figures, "build_arch", lambda arch: "sm_90a")
    monkeypatch.setattr(torch_launch, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch_launch, "current_device", lambda: -1)
    monkeypatch.setattr(torch_launch, "current_stream", lambda index: 0)
    monkeypatch.setattr(plan_cache, "MAX_PLANS", LIMIT)
    return found


def pool(row: int) -> torch.Tensor:
    """Four states whose rows lie ``row`` elements apart."""
    return torch.zeros(4 * row).as_strided((4, 2, 64, 64), (row, 64 * 64, 64, 1))


def test_decoding(launched: list[Made], monkeypatch: pytest.MonkeyPatch) -> None:
    d, size = Draw(), 2 * 64 * 64
    x = RecurrentInputs(*(d.normal(2, 1, 2, 64) for _ in range(4)), d.normal(2, 1, 2), A_log=torch.zeros(2))
    x = x._replace(initial_state=pool(size), state_indices=torch.tensor([0, 3]))
    request = request_of("fused_recurrent_kda", x, inplace_state=True, **BOUNDED_MODEL)
    made: list[Any] = []
    make = RECURRENT._call._make
    monkeypatch.setattr(RECURRENT._call, "_make", lambda *given: made.append(given) or make(*given))

    def launch(inputs: RecurrentInputs) -> Made:
        call = RECURRENT.make_fast_call(request, inputs)
        assert call is not None and RECURRENT.make_fast_call(request, inputs) is call
        launched.clear()
        assert call(tuple(inputs)) is not None
        (found,) = launched
        return found

    kernel, params = launch(x)
    assert kernel.endswith(f"MODE{RecurrentMode.ONE_TOKEN:d}")
    assert (params["h0_row"], params["ht_row"]) == (size, size)
    wide = d.normal(2, 1, 4, 64)[:, :, ::2]
    for other in (x._replace(initial_state=pool(size + 1)), x._replace(q=wide)):
        kernel, params = launch(other)
        assert kernel.endswith("MODE0") and params["q_sh"] == other.q.stride(2)
    for i in range(1, 200):
        kernel, params = launch(x._replace(initial_state=pool(size + 4 * i)))
        assert kernel.endswith(f"MODE{RecurrentMode.ONE_TOKEN:d}")
        assert (params["h0_row"], params["ht_row"]) == (size + 4 * i, size + 4 * i)
    assert len(made) == 3 + 199
    launch(x)
    assert len(made) == 3 + 199 + 1  # it had been dropped


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
        found = stages._packed(r, strides)
        stages._run(r, {}, tuple(views))
        assert stages._packed(r, strides) is found
        assert [tuple(params[name] for name in names) for _, params in launched] == [strides] * 2
        assert len(stages._packed._plans) <= LIMIT
    if op == "kda_recompute_w_u":  # q is absent, and its strides are those of k
        contiguous = stage_launches.launches_of(r).numbers
        assert contiguous["q_st"] == contiguous["k_st"]
