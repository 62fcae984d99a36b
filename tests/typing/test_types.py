"""What type checkers say of calls: the arrays that go in come out, and wrong calls are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from api_stub import STUB, make

import kdacore

HERE = Path(__file__).parent
CALLS = HERE / "calls.py"
CHECKERS = {
    "mypy": ("mypy", "--config-file=", "--no-incremental", CALLS.name),
    "basedpyright": ("basedpyright", "--pythonpath", sys.executable, "--level", "error", CALLS.name),
}


def test_the_stub_is_made_of_the_source() -> None:
    assert STUB.read_text() == make(), "run: python tests/typing/api_stub.py"


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.exhaustive), "basedpyright"])
def test_calls(checker: str) -> None:
    root = str(Path(kdacore.__file__).parents[1])
    environment = {**os.environ, "MYPYPATH": root, "PYTHONPATH": root}
    command = [sys.executable, "-m", *CHECKERS[checker]]
    ran = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    reported = {int(n) for n in re.findall(rf"{CALLS.name}:(\d+)(?::\d+)?(?: -)?:? error", ran.stdout)}
    wanted = {
        number for number, line in enumerate(CALLS.read_text().splitlines(), 1) if line.endswith("# error")
    }
    assert wanted and reported == wanted, ran.stdout + ran.stderr
