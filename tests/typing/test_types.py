"""What type checkers say of calls: the arrays that go in come out, and wrong calls are refused."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kdacore

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from codegen import public_api  # noqa: E402

CALLS = HERE / "calls.py"
CHECKERS = {
    "mypy": ("mypy", "--config-file=", "--no-incremental", CALLS.name),
    "basedpyright": ("basedpyright", "--pythonpath", sys.executable, "--level", "error", CALLS.name),
}


def test_the_public_functions_are_those_of_the_definitions() -> None:
    assert public_api.SOURCE.read_text() == public_api.source(), "run: python -m codegen.public_api"


def test_the_stub_is_that_of_the_definitions() -> None:
    assert public_api.STUB.read_text() == public_api.stub(), "run: python -m codegen.public_api"


def test_an_argument_without_a_description_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    op = public_api.OPS["chunk_kda"]
    new = dataclasses.replace(
        op, option_arguments=(*op.option_arguments, public_api.Option("audit", "flag", False))
    )
    monkeypatch.setitem(public_api.OPS, "chunk_kda", new)
    with pytest.raises(ValueError, match="chunk_kda: nothing describes audit"):
        public_api.source()


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
