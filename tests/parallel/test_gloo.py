"""Rows on several processes over gloo, on the reference backend, against the float64 oracle on the whole row.

The processes of one number of ranks run all of its checks (``gloo_rank.py``), since starting them takes longest.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = Path(__file__).with_name("gloo_rank.py")


def run(size: int, folder: Path, kind: str, timeout: float) -> tuple[list[int], list[list[str]], str]:
    """Start the processes and wait. Returns their exit codes, the checks that passed on each, and what they said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(size)]
    with contextlib.ExitStack() as stack:
        started = []
        for rank, log in enumerate(logs):
            command = [sys.executable, str(RANK), str(rank), str(size), str(folder), kind]
            out = stack.enter_context(log.open("w"))
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
            stack.callback(process.kill)
            started.append(process)
        codes = [process.wait(timeout=timeout) for process in started]
    files = [folder / f"{rank}.json" for rank in range(size)]
    passed = [json.loads(f.read_text()) for f in files if f.exists()]
    return codes, passed, "\n".join([log.read_text() for log in logs])


def assert_all_pass(size: int, folder: Path, kind: str, at_least: int, timeout: float) -> None:
    codes, passed, said = run(size, folder, kind, timeout)
    assert codes == [0] * size, said
    assert len(passed) == size and all(len(names) >= at_least for names in passed)


@pytest.mark.parametrize("size", [2, *[pytest.param(n, marks=pytest.mark.exhaustive) for n in (3, 4)]])
def test_ranks(size: int, tmp_path: Path) -> None:
    assert_all_pass(size, tmp_path, "all", at_least=11, timeout=240)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4])
def test_longer_rows(size: int, tmp_path: Path) -> None:
    assert_all_pass(size, tmp_path, "long", at_least=8, timeout=900)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_dtensors(size: int, tmp_path: Path) -> None:
    """Compiled, and on meshes of two dimensions; the others are among those of :func:`test_ranks`."""
    assert_all_pass(size, tmp_path, "dtensors", at_least=2, timeout=240)


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    codes, passed, said = run(2, tmp_path, "dies", timeout=60)
    assert codes == [0, 3], said
    assert passed == [["dies"]]
