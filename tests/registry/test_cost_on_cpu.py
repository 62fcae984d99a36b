"""Costs on CPUs: the reference has measured ones, other sizes follow, and ``kdacore tune`` measures every backend."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdacore
from kdacore.bench import cost_shapes
from kdacore.bench.cases import Case
from kdacore.bench.cost_measure import DisagreementError, hold_together
from kdacore.calls.description import CallDescription
from kdacore.calls.requests import request_of
from kdacore.calls.values import Shape
from kdacore.cli import main as cli
from kdacore.dispatch import cost, cost_tables
from kdacore.hookspecs import hookimpl
from kdacore.machine import cpu_name
from kdacore.registry import REGISTRY
from kdacore.types import Backend, Device, Outputs, Request


class Copy:
    """The reference's forward of chunk_kda under another name, slower where asked, without a cost."""

    def __init__(self, name: str, rank: int, seconds: float = 0.0) -> None:
        self.name, self.rank, self.seconds = name, rank, seconds

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        reference = REGISTRY.get("reference").backend
        whole = reference.ops["chunk_kda"]

        def forward(request: Request, inputs: Any) -> Outputs:
            time.sleep(self.seconds)
            found: Outputs = whole.forward(request, inputs)
            return found

        ops = {"chunk_kda": dataclasses.replace(whole, forward=forward, cost=None)}
        return [dataclasses.replace(reference, name=self.name, rank=self.rank, ops=ops)]


@pytest.fixture(autouse=True)
def _costs_of_cpus(cpu_costs: Path) -> Path:
    return cpu_costs


def _call(T: int = 200) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((1, T, 2, 32), dtype=np.float32) / 6 for n in ("q", "k", "v")}
    return {**x, "g": -np.abs(x["q"]), "beta": np.full((1, T, 2), 0.5, np.float32)}


def _request(**changes: Any) -> Request:
    sizes = Shape(**{"B": 1, "T": 256, "H": 2, "HV": 2, "K": 128, "V": 128, **changes.pop("shape", {})})
    float32 = dict.fromkeys(("dtype", "gate_dtype", "beta_dtype"), "float32")
    return request_of(CallDescription(shape=sizes, kind="numpy", **{**float32, **changes}))


def _ran(**call: Any) -> str:
    with kdacore.record_selections() as ran:
        kdacore.chunk_kda(**call)
    return ran[0].backend


def test_a_plugin_of_a_higher_rank_without_a_cost_does_not_replace_the_reference() -> None:
    REGISTRY.register(Copy("slow", rank=10), "slow")
    with pytest.warns(kdacore.PerformanceWarning, match=r"'slow' \(rank 10\) is passed over for 'reference'"):
        assert _ran(**_call()) == "reference"
    assert _ran(**_call()) == "reference"
    REGISTRY.unregister("slow")


def test_times_of_other_sizes_and_dtypes_follow_from_measured_ones() -> None:
    known = cost.predict("reference", _request())
    assert known is not None and known.source.startswith("measured from calls with"[:8])
    for shape, factor in (({"K": 256, "V": 128}, 2.0), ({"K": 128, "V": 96}, 0.75)):
        found = cost.predict("reference", _request(shape=shape))
        assert found is not None and found.seconds == pytest.approx(factor * known.seconds)
        assert "from calls with K=128, V=128" in found.source
    wide = cost.predict(
        "reference", _request(**dict.fromkeys(("dtype", "gate_dtype", "beta_dtype"), "float64"))
    )
    assert wide is not None and "from calls with float32" in wide.source
    large = cost.predict("reference", _request(shape={"T": 60_000, "H": 8, "HV": 8}))
    assert large is not None and large.seconds > 100 * known.seconds


def test_other_devices_without_an_architecture_have_no_costs() -> None:
    assert cost_tables.in_use(Device("cpu")) is cost_tables.shipped("")
    assert cost_tables.in_use(Device("meta")) is None


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [c for c in cost_shapes.cpu_cases("numpy") if c.op == "chunk_kda" and c.T <= 256 and c.K == 32]
    monkeypatch.setattr(cost_shapes, "cases", lambda device_type: kept)


@pytest.mark.usefixtures("few_calls")
def test_tune_measures_every_backend_for_cpus(cpu_costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    REGISTRY.register(Copy("slow", rank=10, seconds=0.02), "slow")
    assert cli.main(["tune", "--device", "cpu", "--samples", "2"]) == 0
    path = cost_tables.path_of("", cpu_name())
    assert path.parent == cpu_costs and f"written: {path}" in capsys.readouterr().out.replace("\n", "")
    found = cost_tables.in_use(Device("cpu"))
    assert found is not None and set(found.backends) == {"reference", "slow"}
    selection = kdacore.explain("chunk_kda", **_call())
    assert selection.why == "lowest cost" and selection.backend == "reference"
    assert selection.candidate("slow").cost > 0.02  # type: ignore[operator]
    assert _ran(**_call()) == "reference"
    REGISTRY.unregister("slow")


def test_plain_calls_are_served_by_the_plainest_backend() -> None:
    """Every backend for CPUs can be measured: the calls use no feature at all."""
    for kind in cost_shapes.CPU_KINDS:
        cases = list(cost_shapes.cpu_cases(kind))
        assert all(not _features(case) for case in cases)
        assert {case.op.startswith("chunk") for case in cases} == {True, False}


def _features(case: Case) -> frozenset[str]:
    from kdacore.bench.contenders import described

    return request_of(described(case, "cpu")).features


def test_results_of_other_libraries_than_torch_are_compared() -> None:
    case = next(cost_shapes.cpu_cases("numpy"))
    one = np.ones((3, 4), np.float32)
    hold_together(case, {"a": [one], "b": [one.copy()]})
    with pytest.raises(DisagreementError):
        hold_together(case, {"a": [one], "b": [2 * one]})
