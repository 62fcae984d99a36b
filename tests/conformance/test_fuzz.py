"""Random calls by the command line: what is recorded, what fails, what a dying process costs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from kdacore.ops import STAGES
from kdacore.testing import compiled_programs, fuzz, processes, random_cases
from kdacore.testing.fuzz import Task
from kdacore.testing.random_limits import NO_LIMITS, Limits, Size, add_limits, limits_of
from kdacore.testing.suite import run_case


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said about the machine takes child processes, and has tests of its own."""
    monkeypatch.setattr(fuzz.machine, "probe", lambda: fuzz.machine.Machine((), (), ()))


REFERENCE = Task("reference", "cpu", "quick")


def test_the_record_says_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "fuzz.json"
    words = ["--backend", "reference", "--count", "6", "--seed", "0", "--json", str(path), "--commit", "abc"]
    assert fuzz.main(words) == 0
    found = json.loads(path.read_text())
    assert found["seeds"] == {"first": 0, "count": 6} and found["commit"] == "abc"
    assert found["served"] + found["declined"] == 6 and found["failed"] == 0 and found["failures"] == []
    assert found["worst"] and all(row["ratio"] < 1 for row in found["worst"].values())
    assert "6 served" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--count", "0"], ["--count", "-3"], ["--seed", "-1"], ["--jobs", "0"], ["--seconds", "nan"]]
)
def test_numbers_that_make_no_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        fuzz.main(["--backend", "reference", *words])
    assert done.value.code == 2
    assert f"argument {words[0]}: {words[1]!r} is " in capsys.readouterr().err


def test_a_device_that_is_not_here_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(random_cases, "has_device", lambda kind, device: device == "cpu")
    assert fuzz.main(["--backend", "reference", "--device", "cuda", "--count", "1"]) == 2
    assert capsys.readouterr().err == "backend 'reference' serves none of its whole ops on cuda here\n"


def test_an_unknown_backend_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--backend", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_stages_are_drawn_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    # Seeds of NumPy and torch calls: JAX compiles for half a minute.
    words = [
        "--backend",
        "reference",
        "--calls",
        "stages",
        "--seed",
        "12",
        "--count",
        "12",
        "--json",
        str(path),
    ]
    assert fuzz.main([*words, "--commit", "abc"]) == 0
    found = json.loads(path.read_text())
    assert found["calls"] == "stages" and found["served"] == 12
    assert set(found["served_by_op"]) <= set(STAGES) and len(found["served_by_op"]) > 2
    assert found["worst"] and all(row["ratio"] < 1 for row in found["worst"].values())


def test_sizes_that_all_calls_have(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    limits = ["--op", "chunk_kda", "--check", "accuracy", "--size", "B=2", "T=5..9", "HV=6"]
    words = ["--backend", "reference", *limits, "--count", "12", "--json", str(path), "--commit", "abc"]
    assert fuzz.main(words) == 0
    found = json.loads(path.read_text())
    assert found["limits"] == {"op": "chunk_kda", "check": "accuracy", "B": [2, 2], "T": [5, 9], "HV": [6, 6]}
    assert found["served_by_op"] == {"chunk_kda": 12}
    task = Task(
        "reference",
        "cpu",
        "quick",
        limits=Limits("chunk_kda", "accuracy", (Size("B", 2, 2), Size("HV", 6, 6))),
    )
    drawn = [task.case(seed) for seed in range(40)]
    assert {(c.op, c.check, c.shape.B, c.shape.HV, c.shape.lengths) for c in drawn} == {
        ("chunk_kda", "accuracy", 2, 6, ())
    }
    assert {c.shape.H for c in drawn} == {1, 2, 3, 6} and len({c.shape.T for c in drawn}) > 20


@pytest.mark.parametrize("text", ["T", "T=", "T=0", "T=9..5", "T=-1", "H=3", "T=1..x"])
def test_sizes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        fuzz.main(["--backend", "reference", "--check", "accuracy", "--size", text])
    assert done.value.code == 2 and f"argument --size: {text!r} is not a size" in capsys.readouterr().err


def test_sizes_need_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        fuzz.main(["--backend", "reference", "--size", "T=5"])
    assert done.value.code == 2 and "argument --size: needs --check" in capsys.readouterr().err


def test_many_items_have_a_check_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        fuzz.main(["--backend", "reference", "--check", "accuracy", "--many"])
    assert done.value.code == 2 and "argument --many: not with --check" in capsys.readouterr().err


def test_a_size_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        fuzz.main(["--backend", "reference", "--check", "accuracy", "--size", "T=5", "HV=2", "T=7"])
    assert done.value.code == 2 and "argument --size: more than one of T" in capsys.readouterr().err


def test_the_commands_of_the_guide_are_accepted() -> None:
    guide = Path(__file__).resolve().parents[2] / "docs" / "guide" / "writing-a-backend.md"
    lines = [x for x in guide.read_text().splitlines() if x.startswith("python -m kdacore.testing.fuzz ")]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line)[3:]
        parser = fuzz._parser()
        limits_of(parser, parser.parse_args(words))


def test_stages_have_no_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        fuzz.main(["--backend", "reference", "--calls", "stages", "--check", "gradients"])
    assert done.value.code == 2 and "argument --check: stages have no gradients" in capsys.readouterr().err


def test_limits_as_arguments() -> None:
    parser = argparse.ArgumentParser()
    add_limits(parser)
    limits = Limits("chunk_kda", "accuracy", (Size("B", 1, 1), Size("T", 5, 9)))
    assert limits_of(parser, parser.parse_args(limits.words())) == limits
    many = Limits("chunk_kda", together=7, many=True)
    assert limits_of(parser, parser.parse_args(many.words())) == many
    assert many.described() == {"op": "chunk_kda", "together": 7, "many": True}
    assert limits_of(parser, parser.parse_args([])) == NO_LIMITS and NO_LIMITS.words() == []


def test_an_op_that_is_not_drawn_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--backend", "reference", "--op", "chunk_kdx"]) == 2
    assert capsys.readouterr().err == "--op: backend 'reference' has no 'chunk_kdx' among its whole ops\n"


def test_a_backend_without_stages_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--backend", "pallas", "--calls", "stages"]) == 2
    assert "has no stages" in capsys.readouterr().err


def test_a_failure_is_counted_and_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(task: Task, seed: int) -> dict[str, Any]:
        return fuzz._lost(task, seed, "it did not\nmeet its bound")

    monkeypatch.setattr(fuzz, "run_seed", fail)
    assert fuzz.main(["--backend", "reference", "--count", "1", "--seed", "7"]) == 1
    text = capsys.readouterr().out
    assert "seed 7 FAILED" in text and "meet its bound" in text


@pytest.mark.exhaustive
def test_processes_give_what_one_gives() -> None:
    alone = fuzz.fuzz(REFERENCE, range(3))
    shared = fuzz.fuzz(REFERENCE, range(3), jobs=2)
    for a, b in zip(alone, shared, strict=True):
        # NumPy's norms depend in their last bit on where arrays lie in memory.
        assert {**a, "seconds": 0, "error": 0} == {**b, "seconds": 0, "error": 0}
        assert a["error"] == pytest.approx(b["error"], rel=1e-12)


def test_a_time_limit_leaves_the_last_seeds_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, run_seed = [0.0], fuzz.run_seed

    def slow(task: Task, seed: int) -> dict[str, Any]:
        now[0] += 2
        return run_seed(task, seed)

    monkeypatch.setattr(fuzz.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(fuzz, "run_seed", slow)
    path = tmp_path / "fuzz.json"
    words = [
        "--backend",
        "reference",
        "--count",
        "9",
        "--seconds",
        "3",
        "--json",
        str(path),
        "--commit",
        "abc",
    ]
    assert fuzz.main(words) == 0
    found = json.loads(path.read_text())
    assert found["seeds"] == {"first": 0, "count": 2} and found["served"] + found["declined"] == 2


def test_processes_stop_at_the_time_limit() -> None:
    assert fuzz.fuzz(REFERENCE, range(3), jobs=2, seconds=0) == []


def die(work: Any, pipe: Any, safe_path: str | None) -> None:
    """A worker that every call kills."""
    pipe.recv()
    os._exit(3)


def test_a_call_that_ends_its_process_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_serve", die)
    rows = fuzz.fuzz(REFERENCE, range(2), jobs=2)
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert "exit code 3" in rows[0]["message"] and rows[0]["case"]["seed"] == 0


def test_compiled_programs_are_dropped_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have 65,530 memory maps, and a few hundred calls of xla would have more."""
    import jax

    def programs() -> int:
        return len(jax.devices("cpu")[0].client.live_executables())

    assert fuzz.run_seed(Task("xla", "cpu", "quick"), 4)["id"].startswith("kda_gate-accuracy-random4-jax")
    before = programs()
    of_numpy = random_cases.random_case("reference", 0, "cpu", only=("numpy",))
    assert run_case(of_numpy).status == "served"
    assert programs() == before
    monkeypatch.setattr(compiled_programs, "MANY_MAPS", 0)
    monkeypatch.setattr(compiled_programs, "SECONDS", 0)
    assert run_case(of_numpy).status == "served"
    assert programs() < before
