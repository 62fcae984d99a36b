"""The list of CI's gates, ``.ci/gates.json``, and what ``.ci/run`` makes of it."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "run"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("kdacore_ci_gates", ROOT / ".ci" / "gates.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gates = _load()


def gate(name: str, date: str | None = None, minutes: float = 5.0, always: bool = False) -> dict[str, Any]:
    last = {"date": date, "commit": "0" * 40, "minutes": minutes, "cpu_minutes": 2 * minutes}
    return {"name": name, "what": f"about {name}", "always": always, "last": last if date else None}


THREE = [gate("tests", "2026-01-09", always=True), gate("new", "2026-01-08"), gate("old", "2026-01-02")]


def test_every_gate_of_the_script_is_in_the_list() -> None:
    names = re.findall(r"^gate_(\w+)\(\)", SCRIPT.read_text(), re.M)
    assert names and sorted(names) == sorted(g["name"] for g in gates.load())


def test_records_are_of_commits_there_are() -> None:
    """Each recorded run has a commit that this one comes after, made before the day of the run."""
    recorded = [g["last"] for g in gates.load() if g["last"]]
    for last in recorded:
        assert datetime.date.fromisoformat(last["date"]) <= datetime.date.today()
        assert re.fullmatch("[0-9a-f]{40}", last["commit"]) and min(last["minutes"], last["cpu_minutes"]) >= 0
    if not _whole_history():
        pytest.skip("not a checkout with its whole history")
    for last in recorded:
        assert not _git("merge-base", "--is-ancestor", last["commit"], "HEAD").returncode, last["commit"]
        made = _git("show", "-s", "--format=%cs", last["commit"]).stdout.strip()
        assert made <= last["date"], last


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


def _whole_history() -> bool:
    return (
        shutil.which("git") is not None
        and _git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    )


def test_those_of_every_time_come_first_then_the_longest_ago() -> None:
    took: dict[str, tuple[float, float]] = {}
    order = []
    while name := gates.next_gate(THREE, took, 40, 65):
        order.append(name)
        took[name] = (5.0, 10.0)
    assert order == ["tests", "old", "new"]
    assert gates.next_gate([*THREE, gate("never")], {"tests": (5.0, 10.0)}, 40, 65) == "never"


@pytest.mark.parametrize(
    ("took", "limits"),
    [((5.0, 10.0), (9.0, 65.0)), ((5.0, 10.0), (40.0, 19.0)), ((20.0, 10.0), (39.0, 65.0))],
    ids=["clock", "CPU", "a slow machine"],
)
def test_a_gate_that_would_not_end_in_time_does_not_begin(
    took: tuple[float, float], limits: tuple[float, float]
) -> None:
    assert gates.next_gate(THREE, {"tests": took}, *limits) is None
    assert gates.next_gate([gate("short", "2026-01-03", 1.0), *THREE], {"tests": took}, *limits) == "short"


def test_those_of_every_time_begin_at_any_time() -> None:
    assert gates.next_gate(THREE, {"old": (100.0, 100.0)}, 40, 65) == "tests"


def test_the_summary_says_when_the_others_last_ran() -> None:
    text = "\n".join(gates.summary([*THREE, gate("never")], {"tests": (5.0, 10.0), "new": (1.0, 2.5)}))
    assert re.search(r"^ +6\.0 +12\.5  together$", text, re.M)
    assert "about old: last ran on 2026-01-02 at 000000000000" in text
    assert "about never: never recorded" in text and "about new: last ran" not in text
    assert "all gates ran" in "\n".join(gates.summary(THREE[:1], {"tests": (5.0, 10.0)}))


def test_a_run_is_recorded_for_the_gates_that_ran(tmp_path: Path) -> None:
    noted = tmp_path / "took"
    noted.write_text("tests 300 612.5\n")
    after = gates.record(THREE, gates.read_times(noted), "2026-01-10", "a" * 40)
    assert after[1:] == THREE[1:]
    assert after[0]["last"] == {"date": "2026-01-10", "commit": "a" * 40, "minutes": 5.0, "cpu_minutes": 10.2}
    gates.write(after, tmp_path / "gates.json")
    assert gates.load(tmp_path / "gates.json") == after
    assert json.loads((tmp_path / "gates.json").read_text()) == after


def test_no_record_of_files_that_are_in_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"status": " M .ci/gates.json\n M kdacore/api.py", "rev-parse": "b" * 40}
    monkeypatch.setattr(gates, "_git", lambda *words: answers[words[0]])
    with pytest.raises(SystemExit, match=r"kdacore/api\.py"):
        gates._tested_commit()
    answers["status"] = " M .ci/gates.json"
    assert gates._tested_commit() == "b" * 40
