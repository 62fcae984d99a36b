"""``kdacore tune``: the cost table it measures, going on after an interruption, and what it says where it cannot run.

Backends for CPU tensors stand in for those of a GPU, and a clock that only counts for its clock.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kdacore import config  # noqa: E402
from kdacore.bench import cases, clock, cost_measure, cost_shapes  # noqa: E402
from kdacore.bench.cases import Case  # noqa: E402
from kdacore.bench.clock import Budget, Step  # noqa: E402
from kdacore.cli import main as cli  # noqa: E402
from kdacore.cli import tune_costs  # noqa: E402
from kdacore.dispatch import cost, cost_tables  # noqa: E402
from kdacore.hookspecs import hookimpl  # noqa: E402
from kdacore.registry import REGISTRY  # noqa: E402
from kdacore.types import Backend, Device, Outputs, Request  # noqa: E402

NAME = "Test X1"
HERE = Device("cpu", 0, "sm_x")
ONCE = Budget(samples=1, seconds=1.0, least=1)
SMALL = [
    Case(name="one", T=70, H=2, K=16, V=16, dtype="float32", gate_sets=("init",)),
    Case(name="two", T=40, H=2, K=16, V=16, dtype="float32", gate_sets=("init",)),
    Case(name="train", T=40, H=1, K=16, V=16, dtype="float32", phase="training", gate_sets=("init",)),
    Case(name="decode", B=2, T=1, H=2, K=16, V=16, dtype="float32", op="fused_recurrent_kda", phase="decode"),
]


class Second:
    """The reference backend under another name; ``spoil`` changes its outputs."""

    def __init__(self, spoil: Callable[[Any], Any] = lambda outputs: outputs) -> None:
        self.spoil = spoil

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        reference = REGISTRY.get("reference").backend
        whole = reference.ops["chunk_kda"]
        op = dataclasses.replace(whole, forward=lambda r, x: self.spoil(whole.forward(r, x)))
        return [dataclasses.replace(reference, name="second", ops={"chunk_kda": op})]


class Counter:
    """Takes a second more each time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Step) -> float:
        step()
        self.count += 1
        return float(self.count)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own, and a CPU that ``kdacore tune`` takes for its GPU."""
    monkeypatch.setenv("KDACORE_CACHE_DIR", str(tmp_path))
    config.refresh()
    monkeypatch.setattr(tune_costs, "default_device", lambda: "cuda")
    monkeypatch.setattr(tune_costs, "device_of", lambda name: HERE)
    monkeypatch.setattr(tune_costs, "name_of", lambda device: NAME)
    monkeypatch.setattr(tune_costs, "torch_name", lambda device: "cpu")
    monkeypatch.setattr(tune_costs, "CudaClock", Counter)
    monkeypatch.setattr(cost_shapes, "cases", lambda device_type: SMALL)
    monkeypatch.setattr(cost_tables, "_name", lambda device: NAME)
    yield tmp_path / "costs" / "sm_x-Test-X1.json"


@pytest.mark.usefixtures("machine")
def test_a_table_is_measured_and_used(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    REGISTRY.register(Second(), "second")
    assert cli.main(["tune", "--samples", "1"]) == 0
    assert f"written: {machine}" in capsys.readouterr().out.replace("\n", "")
    assert [p.name for p in machine.parent.iterdir()] == [machine.name]
    found = cost_tables.in_use(Device("cuda", 0, "sm_x"))
    assert found is not None and found.device == NAME
    assert {"reference", "second"} <= set(found.backends)
    request = Request(
        "chunk_kda",
        "torch",
        Device("cuda", 0, "sm_x"),
        1,
        70,
        2,
        2,
        16,
        16,
        1,
        "float32",
        "float32",
        gate="sigmoid",
    )
    said = {name: cost.predict(name, request) for name in ("reference", "second")}
    assert all(p is not None and p.source == f"measured ({NAME}; {machine})" for p in said.values()), said
    assert {group.op for _, group in found.times} == {"chunk_kda", "fused_recurrent_kda"}
    assert {group.grad for _, group in found.times} == {False, True}


def test_an_interrupted_run_goes_on(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = machine.with_name("sm_x-Test-X1.partial.json")
    assert cli.main(["tune", "--minutes", "1e-9"]) == 1
    said = capsys.readouterr().err
    assert "of 4 calls are still to be measured; run it again to go on" in said
    machine.parent.mkdir(exist_ok=True, mode=0o700)
    measured = cost_measure.Measured(partial, HERE, NAME)
    measured.seconds = {case.name: {"reference": 0.25} for case in SMALL[:3]}
    measured.save()
    assert cli.main(["tune"]) == 0
    assert "3 calls are measured" in capsys.readouterr().out
    assert not partial.exists()
    points = [e["points"] for e in json.loads(machine.read_text())["times"] if e["backend"] == "reference"]
    assert sum(seconds == 0.25 for column in points for _, _, seconds in column) == 3


@pytest.mark.parametrize("change", [{"schema": 99}, {"arch": "sm_y"}, {"device": "other"}, {"backends": {}}])
def test_what_another_machine_left_is_not_gone_on_from(tmp_path: Path, change: dict[str, Any]) -> None:
    measured = cost_measure.Measured(tmp_path / "x.partial.json", HERE, NAME, {"one": {"reference": 1.0}})
    measured.save()
    again = cost_measure.Measured(measured.path, HERE, NAME)
    assert again.load() and again.seconds == measured.seconds
    measured.path.write_text(json.dumps({**json.loads(measured.path.read_text()), **change}))
    assert not cost_measure.Measured(measured.path, HERE, NAME).load()


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_partial_file_is_not_gone_on_from(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.partial.json"
    path.write_text(text)
    assert not cost_measure.Measured(path, HERE, NAME).load()


def test_fresh_measures_everything(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.parent.mkdir(mode=0o700)
    left = cost_measure.Measured(machine.with_name("sm_x-Test-X1.partial.json"), HERE, NAME)
    left.seconds = {"one": {"reference": 123.0}}
    left.save()
    assert cli.main(["tune", "--fresh"]) == 0
    assert "going on" not in capsys.readouterr().out
    assert "123.0" not in machine.read_text()


def test_nothing_is_written_where_backends_disagree(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def double(outputs: Outputs) -> Outputs:
        return outputs._replace(o=2 * outputs.o)

    REGISTRY.register(Second(double), "second")
    assert cli.main(["tune"]) == 1
    said = capsys.readouterr().err
    assert "one: kdacore reference and kdacore second differ by 1," in said and "nothing is written" in said
    assert not machine.exists()


def test_nan_is_a_disagreement() -> None:
    x = torch.ones(3)
    with pytest.raises(cost_measure.DisagreementError):
        cost_measure.hold_together(SMALL[0], {"a": [x], "b": [x * float("nan")]})
    cost_measure.hold_together(SMALL[0], {"a": [x], "b": [x.clone()]})
    cost_measure.hold_together(SMALL[0], {})


def test_a_call_too_large_for_the_device_is_left_out(machine: Path) -> None:
    def too_large(outputs: Outputs) -> Outputs:
        raise torch.OutOfMemoryError("no room")

    REGISTRY.register(Second(too_large), "second")
    assert cost_measure.seconds_of(SMALL[0], "cpu", ONCE, Counter()) == {}


def test_other_errors_are_not_hidden(machine: Path) -> None:
    def broken(outputs: Outputs) -> Outputs:
        raise RuntimeError("no luck")

    REGISTRY.register(Second(broken), "second")
    with pytest.raises(RuntimeError, match="no luck"):
        cost_measure.seconds_of(SMALL[0], "cpu", ONCE, Counter())


@pytest.mark.usefixtures("machine")
def test_where_the_file_goes_can_be_said(tmp_path: Path) -> None:
    assert cli.main(["tune", "--out", str(tmp_path / "mine.json"), "--only", "one"]) == 0
    assert cost_tables.parse((tmp_path / "mine.json").read_text()).device == NAME


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--list", "--device", "cuda", "--only", "phase=training"]) == 0
    assert "B=1 T=4096 H=8 phase=training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--only", "no such call"], 2, "no call is left"),
        (["--samples", "0"], 2, "--samples must be positive"),
        (["--minutes", "-1"], 2, "--minutes must be positive"),
        (["--op", "chunk_kda"], 2, "--op: for `kdacore tune configs`"),
        (["--device", "cuda:99"], 1, "no NVIDIA GPU"),
    ],
)
def test_what_it_cannot_do(
    words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *words]) == status
    assert said in capsys.readouterr().err


def test_every_call_of_a_table_has_a_name_of_its_own() -> None:
    names = [case.name for device in ("cuda", "cpu") for case in cost_shapes.cases(device)]
    assert len(set(names)) == len(names)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_a_few_calls(tmp_path: Path) -> None:
    out = tmp_path / "costs.json"
    assert cli.main(["tune", "--only", "T=64 H=8", "--samples", "2", "--out", str(out)]) == 0
    table = cost_tables.parse(out.read_text())
    assert table.device == torch.cuda.get_device_name() and set(table.backends) >= {"cuda", "triton"}


def test_cases_are_those_of_the_bench() -> None:
    """Every call of a table can be made, on the CPU in small."""
    some = cost_shapes.cases("cuda")[::25]
    for case in some:
        small = dataclasses.replace(cases.tiny(case), name=case.name)
        assert "reference" in cost_measure.seconds_of(small, "cpu", ONCE, clock.HostClock())
