"""The doctor's section on cost tables: which is used here, and why others are not."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from kdacore import config, device, machine
from kdacore.cli import main as cli
from kdacore.dispatch import cost_tables
from kdacore.dispatch.cost_tables import Group, Table
from kdacore.hookspecs import hookimpl
from kdacore.machine import Accelerator, Machine
from kdacore.registry import REGISTRY
from kdacore.types import Backend, Device

pytestmark = pytest.mark.usefixtures("requests_built_once")
GROUP = Group("chunk_kda", "torch", "bfloat16", False, 128, 128)
TIMES = MappingProxyType({("reference", GROUP): {(("packed", False),): {64: ((16.0, 0.5),)}}})
HERE = Accelerator("torch", "cuda", "sm_90", "NVIDIA H100 80GB HBM3")
SHIPPED = "shipped for sm_90"
machine_probe = machine.probe
"""The real one: tests of the command line have a small machine in its place."""


@pytest.fixture
def folder(small_machine: Machine) -> Path:
    path = config.get().cache_dir / "costs"
    path.mkdir(parents=True, mode=0o700)
    return path


def with_gpu(monkeypatch: pytest.MonkeyPatch, *accelerators: Accelerator) -> None:
    found = Machine((), accelerators, ("numpy",))
    monkeypatch.setattr(machine, "probe", lambda: found)


def put(device: str = HERE.name, backends: dict[str, str] | None = None) -> Path:
    table = Table("sm_90", device, "2026-11-25", backends or {"reference": "0.1.0"}, TIMES)
    path = cost_tables.path_of("sm_90", device)
    path.write_text(cost_tables.dump(table))
    return path


def diagnose(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    cli.main(["doctor", "--json", "--no-selfcheck"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def statuses(found: dict[str, Any]) -> dict[str, str]:
    """Of the tables of GPUs."""
    return {row["table"]: row["status"] for row in found["costs"] if row["device"] != "AMD EPYC, one thread"}


@pytest.mark.usefixtures("folder")
def test_the_shipped_table_is_used_where_there_is_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert statuses(diagnose(capsys)) == {SHIPPED: "not used here"}
    with_gpu(monkeypatch, HERE)
    found = diagnose(capsys)
    assert statuses(found) == {SHIPPED: f"used for {HERE.name}"}
    assert "NVIDIA H200" in [row["device"] for row in found["costs"]] and found["problems"] == []


@pytest.mark.usefixtures("folder")
def test_a_table_of_this_device_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, HERE)
    own, other = put(), put("NVIDIA X2")
    found = diagnose(capsys)
    assert statuses(found) == {
        str(own): "used",
        str(other): "not used: no NVIDIA X2 here",
        SHIPPED: "not used here",
    }
    assert found["problems"] == []


@pytest.mark.usefixtures("folder")
def test_a_damaged_table_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, HERE)
    path = put()
    path.write_text("{")
    found = diagnose(capsys)
    assert statuses(found)[str(path)].startswith("ignored: it is not JSON")
    assert statuses(found)[SHIPPED] == f"used for {HERE.name}"
    (problem,) = found["problems"]
    assert problem["where"] == f"cost table {path}" and "`kdacore tune` measures it again" in problem["what"]


@pytest.mark.usefixtures("folder")
def test_a_table_of_another_version_is_no_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, HERE)
    path = put(backends={"reference": "0.0.1"})
    found = diagnose(capsys)
    said = "ignored: it was measured with reference 0.0.1; here it is 0.1.0. `kdacore tune` measures it again"
    assert statuses(found)[str(path)] == said
    assert found["problems"] == []


@pytest.mark.usefixtures("folder")
def test_the_text_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    put("NVIDIA X2")
    assert cli.main(["doctor", "-v", "--no-selfcheck"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cost tables for automatic choice" in said and "not used: no NVIDIA X2 here" in said


@pytest.mark.usefixtures("folder")
def test_a_gpu_has_the_name_that_torch_gives_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``doctor`` shows of it beside the name is no part of it: its table was taken for another's."""
    properties = SimpleNamespace(name=HERE.name, total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(device, "torch_device", lambda *place: Device("cuda", 0, HERE.arch))

    def answer(code: str, seconds: float = 0.0) -> tuple[Any, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {})
        return machine.decode(0, out.getvalue(), "")

    monkeypatch.setattr(machine, "child", answer)
    monkeypatch.setattr(machine, "probe", machine_probe)
    own = put()
    found = diagnose(capsys)
    assert statuses(found)[str(own)] == "used"
    assert any(f"{HERE.name} (sm_90, 80 GiB)" in row["value"] for row in found["machine"])


def test_the_cpu_has_a_table_and_a_plugin_without_a_cost_a_line(
    cpu_costs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = REGISTRY.get("reference").backend
    op = dataclasses.replace(reference.ops["chunk_kda"], cost=None)

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            return [dataclasses.replace(reference, name="fast", rank=10, ops={"chunk_kda": op})]

    REGISTRY.register(Plugin(), "fast")
    found = diagnose(capsys)
    rows = {row["table"]: row["status"] for row in found["costs"]}
    assert rows["shipped for CPUs"] == f"used for {machine.cpu_name()}"
    (row,) = found["passed_over"]
    assert (row["backend"], row["op"], row["on"]) == ("fast", "chunk_kda", "numpy cpu")
    assert "`kdacore tune --device cpu`" in row["what"]
