"""``python -m benchmarks.sanitizers``: cutting the calls, reading the tool's words, whole runs of a tool of our own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kdacore.testing.random_limits import NO_LIMITS, Limits, Size

ROOT = Path(__file__).resolve().parents[2]
FAKE = """#!/bin/sh
while [ "$1" != "{python}" ]; do shift; done
"$@" || exit 3
echo "========= {report}"
echo "========= RACECHECK SUMMARY: {found} hazards displayed ({found} errors, 0 warnings)"
exit {status}
"""


@pytest.fixture
def sanitizers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitizers", ROOT / "benchmarks" / "sanitizers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_seed_is_in_one_share(sanitizers: ModuleType) -> None:
    for count, jobs in ((150, 5), (7, 3), (2, 4)):
        found = sanitizers.shares(3000, count, jobs)
        assert [s for first, n in found for s in range(first, first + n)] == list(range(3000, 3000 + count))
        assert max(n for _, n in found) - min(n for _, n in found) <= 1


@pytest.mark.parametrize("kinds", [("whole", "stages"), ("whole",), ("stages",)])
def test_stages_run_too_where_there_are_any(
    sanitizers: ModuleType, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sanitizers, "calls_of", lambda backend: kinds)
    asked = argparse.Namespace(backend="any", seed=7, count=3, stages=2, many_items=0, limits=NO_LIMITS)
    seeds = {"whole": range(7, 10), "stages": range(7, 9)}
    assert {share.calls: share.seeds for share in sanitizers.wanted(asked)} == {
        kind: seeds[kind] for kind in kinds
    }


def test_calls_of_many_items_run_too(sanitizers: ModuleType) -> None:
    """Unless limits say which calls are wanted."""
    asked = argparse.Namespace(
        backend="reference",
        device="cpu",
        seed=7,
        count=0,
        stages=0,
        many_items=5,
        seconds=9.0,
        limits=NO_LIMITS,
    )
    (share,) = sanitizers.wanted(asked)
    assert share == ("whole", range(7, 12), True)
    assert sanitizers.command(asked, share, 1, Path("record"))[-3:] == ["--op", "chunk_kda", "--many"]
    asked.limits = Limits("chunk_kda")
    assert sanitizers.wanted(asked) == []


def test_limits_go_to_the_calls(sanitizers: ModuleType) -> None:
    """An op of one kind leaves the other out."""
    limits = Limits("chunk_kda", "accuracy", (Size("HV", 24, 24),))
    asked = argparse.Namespace(
        backend="reference", device="cpu", seed=7, count=3, stages=2, many_items=8, seconds=9.0, limits=limits
    )
    (share,) = sanitizers.wanted(asked)
    assert share.calls == "whole"
    words = sanitizers.command(asked, share, 1, Path("record"))
    assert words[-6:] == ["--op", "chunk_kda", "--check", "accuracy", "--size", "HV=24..24"]


def test_a_run_is_clean_only_when_the_tool_says_so(sanitizers: ModuleType) -> None:
    clean = sanitizers.summarise("148 served\n========= ERROR SUMMARY: 0 errors\n", 0)
    assert sanitizers.is_clean(clean)
    killed = sanitizers.summarise("148 served\n", 0)
    assert killed["found"] is None and not sanitizers.is_clean(killed)
    text = (
        "========= Invalid __global__ read of size 2\n=========     at x\n========= ERROR SUMMARY: 2 errors\n"
    )
    bad = sanitizers.summarise(text, sanitizers.FOUND)
    assert bad["found"] == 2 and bad["reports"] == ["Invalid __global__ read of size 2"]
    assert not sanitizers.is_clean(sanitizers.summarise("========= ERROR SUMMARY: 0 errors\n", 1))
    # What it found is kept whatever its words.
    other = sanitizers.summarise(
        "========= COMPUTE-SANITIZER\n========= Divergent thread in warp\n========= ERROR SUMMARY: 1 error\n",
        77,
    )
    assert other["found"] == 1 and "Divergent thread in warp" in other["reports"]


@pytest.mark.exhaustive
def test_a_whole_run(sanitizers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = tmp_path / "tool"
    report = "Error: Race reported between Write access"
    tool.write_text(FAKE.format(python=sys.executable, report=report, found=1, status=sanitizers.FOUND))
    tool.chmod(0o755)
    record = tmp_path / "record.json"
    words = ["racecheck", "--backend", "reference", "--device", "cpu", "--command", str(tool)]
    words += ["--count", "2", "--stages", "1", "--many-items", "1", "--jobs", "1", "--json", str(record)]
    assert sanitizers.main(words) == 1
    runs = json.loads(record.read_text())["runs"]
    assert [(run["calls"], run["many"], run["ran"]) for run in runs] == [
        ("stages", False, 1),
        ("whole", False, 2),
        ("whole", True, 1),
    ]
    assert all(run["found"] == 1 and run["failed"] == 0 for run in runs)
    assert "Race reported" in capsys.readouterr().out


def test_without_the_tool_it_says_where_it_comes_from(
    sanitizers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sanitizers.main(["memcheck", "--backend", "reference", "--command", "no-such-tool"])
    assert "CUDA toolkit" in capsys.readouterr().err
