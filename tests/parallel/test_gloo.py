"""Rows on several processes over gloo, on the reference backend, against the float64 oracle on the whole row.

The processes of one number of ranks run all of its checks (``gloo_rank.py``), since starting them takes longest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("gloo_rank.py")


def run(size: int, folder: Path, kind: str, timeout: float) -> tuple[list[int], list[dict[str, str]]]:
    """Start the processes and wait. Returns their exit codes, and what each check came to on each rank that lives."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(size), str(folder), kind],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    print(*said, sep="\n")
    files = [folder / f"{rank}.json" for rank in range(size)]
    return [process.returncode for process in started], [
        json.loads(f.read_text()) for f in files if f.exists()
    ]


def assert_all_pass(size: int, folder: Path, kind: str, at_least: int, timeout: float) -> None:
    codes, found = run(size, folder, kind, timeout)
    for results in found:
        for name, problem in results.items():
            assert not problem, f"{name}:\n{problem}"
    assert codes == [0] * size
    assert len(found) == size and all(len(results) >= at_least for results in found)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.exhaustive), 4])
def test_ranks(size: int, tmp_path: Path) -> None:
    assert_all_pass(size, tmp_path, "all", at_least=11, timeout=240)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4])
def test_longer_rows(size: int, tmp_path: Path) -> None:
    assert_all_pass(size, tmp_path, "long", at_least=8, timeout=900)


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    codes, found = run(2, tmp_path, "dies", timeout=60)
    assert codes == [0, 3]
    assert found == [{"dies": ""}]
