"""Benchmark records: one current record for each preset and machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import current_records  # noqa: E402


def row(case: str, contender: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    status = "ok" if seconds is not None else "skipped"
    more = {"gates": "random", "preset": "p", **more}
    return {"case": case, "phase": "forward", "shape": case, "contender": contender, "seconds": seconds,
            "status": status, **more}  # fmt: skip


def run(commit: str, *rows: dict[str, Any], figures: tuple[str, ...] = ()) -> dict[str, Any]:
    said = [{"preset": "p", "name": name, "value": 1.0} for name in figures]
    return {"schema": 1, "commit": commit, "machine": {"cpu": "x"}, "rows": list(rows), "figures": said}


def merged(*runs: dict[str, Any]) -> dict[str, Any]:
    record = None
    for new in runs:
        record = current_records.merged(record, new, "p")
    assert record is not None
    return record


def seconds(record: dict[str, Any]) -> dict[tuple[str, str, str], tuple[float | None, str]]:
    runs = record["runs"]
    return {
        (r["case"], r["contender"], r["gates"]): (r["seconds"], runs[r["run"]]["commit"])
        for r in record["rows"]
    }


def test_a_new_row_replaces_the_earlier_one_of_its_key() -> None:
    first = run("a", row("one", "cuda", 1.0), row("one", "fla-core 0.6.0", 9.0), row("two", "cuda", 2.0))
    record = merged(first, run("b", row("one", "cuda", 0.5)), run("c", row("one", "fla-core 0.7.0", 8.0)))
    assert seconds(record) == {
        ("one", "cuda", "random"): (0.5, "b"),
        ("one", "fla-core 0.7.0", "random"): (8.0, "c"),
        ("two", "cuda", "random"): (2.0, "a"),
    }
    assert [r["case"] for r in record["rows"]] == ["one", "one", "two"]


def test_both_gate_sets_of_a_row_are_replaced_together() -> None:
    first = run("a", row("one", "cuda", 1.0), row("one", "cuda", 1.5, gates="init"))
    assert seconds(merged(first, run("b", row("one", "cuda", 0.5)))) == {
        ("one", "cuda", "random"): (0.5, "b")
    }


def test_a_skipped_row_replaces_no_measurement() -> None:
    first = run("a", row("one", "cuda", 1.0))
    record = merged(first, run("b", row("one", "cuda", None), row("one", "triton", None)))
    assert seconds(record) == {
        ("one", "cuda", "random"): (1.0, "a"),
        ("one", "triton", "random"): (None, "b"),
    }


def test_a_run_of_which_nothing_is_left_goes() -> None:
    record = merged(run("a", row("one", "cuda", 1.0), figures=("f",)), run("b", row("one", "cuda", 2.0)))
    assert [r["commit"] for r in record["runs"]] == ["b"] and record["figures"] == []
    assert record["rows"][0]["run"] == 0


def test_runs_of_figures_alone() -> None:
    """They stay until a later run has a figure of the same name, in a file as a benchmark writes it too."""
    record = current_records.merged(run("a", figures=("f", "g")), run("b", figures=("g",)), "p")
    found = [(f["name"], record["runs"][f["run"]]["commit"]) for f in record["figures"]]
    assert found == [("f", "a"), ("g", "b")]


def test_a_file_of_figures_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps({**run("a", figures=("f",)), "when": "", "presets": ["p"]}))
    (written,) = current_records.update(path, "h200", tmp_path)
    assert [f["name"] for f in json.loads(written.read_text())["figures"]] == ["f"]


def test_contenders_that_end_in_a_number_are_different() -> None:
    record = merged(run("a", row("one", "clusters of 2", 1.0)), run("b", row("one", "clusters of 4", 2.0)))
    assert len(record["rows"]) == 2


def test_rows_go_to_the_record_of_their_preset(tmp_path: Path) -> None:
    new = run("a", row("one", "cuda", 1.0), row("two", "cuda", 2.0, preset="q"), figures=("f",))
    (tmp_path / "out.json").write_text(json.dumps(new))
    written = current_records.update(tmp_path / "out.json", "gpu", tmp_path)
    assert written == [tmp_path / "gpu/p.json", tmp_path / "gpu/q.json"]
    q = json.loads(written[1].read_text())
    assert [r["case"] for r in q["rows"]] == ["two"] and q["figures"] == [] and q["presets"] == ["q"]
    assert current_records.update(tmp_path / "out.json", "gpu", tmp_path) == written
    assert len(json.loads(written[0].read_text())["runs"]) == 1


def test_what_is_no_record_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["current_records", str(tmp_path / "out.json"), "gpu"])
    assert current_records.main() == 1
    assert "out.json: results schema None" in capsys.readouterr().err
