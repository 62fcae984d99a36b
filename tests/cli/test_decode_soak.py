"""The soak of decode steps, on a CPU: a short run is right, and a fault in any of its parts is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kdacore
from benchmarks import decode_soak
from benchmarks.decode_soak import Sizes, grown, schedule, soak
from kdacore import machine

SMALL = Sizes(steps=200, slots=3, heads=1, dim=16, longest=40)


def test_a_short_run_is_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "probe", lambda: machine.Machine((), (), ()))
    path = tmp_path / "soak.json"
    words = ["--steps", "300", "--slots", "4", "--heads", "1", "--dim", "16", "--longest", "60"]
    assert decode_soak.main([*words, "--device", "cpu", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["problems"] == [] and found["rows_held"] == 4 and found["lives"] > 20
    assert 0 < found["worst_o"] < found["bound_o"] and 0 < found["worst_state"] < found["bound_state"]
    assert set(found["memory_after"]) == {"host"}
    assert capsys.readouterr().out.rstrip().endswith("none")


def test_a_schedule_gives_each_row_to_one_lane_at_a_time() -> None:
    sizes = Sizes(steps=5000, slots=7, heads=1, dim=16, longest=100)
    plan = schedule(sizes, 3)
    assert plan.rows.shape == (sizes.blocks * decode_soak.BLOCK, 7) and plan.fresh.sum() == plan.lives > 500
    for used in plan.rows:
        named = used[used > 0]
        assert len(np.unique(named)) == len(named)
    assert set(plan.last) == set(range(1, 8)) and not plan.rows[sizes.steps :].any()
    lanes = {row: {lane for lane in range(7) if (plan.rows[:, lane] == row).any()} for row in range(1, 8)}
    assert all(len(found) > 3 for found in lanes.values()), "rows change lanes"
    for row, (lane, start, end) in plan.last.items():
        assert (plan.rows[start:end, lane] == row).all() and plan.fresh[start, lane]
        assert not (plan.rows[end:] == row).any() and 0 < end - start <= 100 < sizes.ring


def forgets_to_start_afresh(call: dict[str, Any]) -> None:
    call["has_initial_state"] = torch.ones_like(call["has_initial_state"])


def takes_null_for_a_row(call: dict[str, Any]) -> None:
    if (call["state_indices"] == 0).any():
        call["initial_state"][1] += 1


def decodes_another_token(call: dict[str, Any]) -> None:
    call["k"] = call["k"].flip(0)


@pytest.mark.parametrize("fault", [forgets_to_start_afresh, takes_null_for_a_row, decodes_another_token])
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    original = kdacore.fused_recurrent_kda

    def wrong(**call: Any) -> Any:
        fault(call)
        return original(**call)

    monkeypatch.setattr(kdacore, "fused_recurrent_kda", wrong)
    problems = soak(SMALL, "reference", "cpu", 0, progress=False)["problems"]
    assert any(text.startswith("row ") for text in problems)


def test_memory_that_grows_is_a_problem() -> None:
    before = {"host": 10**8, "allocated": 500, "reserved": 10**6, "device": 10**9}
    assert grown(before, before) == [] and grown(before, before | {"host": 0, "device": 0}) == []
    assert grown(before, before | {"host": 10**8 + (8 << 20)}) == []
    after = {"host": 2 * 10**8, "allocated": 501, "reserved": 10**6 + 2**21, "device": 10**9 + 2**22}
    assert [text.split()[0] for text in grown(before, after)] == ["host", "allocated", "reserved", "device"]
    assert "reserved by 2.0 MiB" in grown(before, after)
