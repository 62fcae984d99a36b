"""docs/guide/writing-a-backend.md and the code say the same: reason codes, checks, commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from kdacore.ops import OPS
from kdacore.testing.checks import CHECKS

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "writing-a-backend.md").read_text()


def _rows(header: str) -> list[str]:
    """First cells of the table under a header."""
    lines = PAGE[PAGE.index(header) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [re.match(r"\| `(\w+)` \|", line)[1] for line in table]  # type: ignore[index]


def _codes_in_the_code() -> set[str]:
    """First argument of every ``Reason(...)`` of ours."""
    found = set()
    for folder in ("kdacore", "backends", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Reason"
                if called and node.args and isinstance(node.args[0], ast.Constant):  # type: ignore[attr-defined]
                    found.add(node.args[0].value)  # type: ignore[attr-defined]
    return found


def test_every_reason_code_is_in_the_table() -> None:
    assert sorted(_codes_in_the_code() - set(_rows("| code |"))) == []


def test_the_table_of_codes_is_sorted() -> None:
    codes = _rows("| code |")
    assert codes == sorted(set(codes))


def test_every_check_is_in_the_table() -> None:
    assert set(_rows("| check |")) == set(CHECKS)


def test_the_commands_are_those_the_plugin_test_runs() -> None:
    tested = (ROOT / "tests" / "examples" / "test_plugin.py").read_text()
    for command in (
        "--kdacore-backend=example",
        "--pyargs",
        "kdacore.testing.conformance",
        "--kdacore-random",
    ):
        assert command in PAGE and command in tested


def test_the_fields_of_the_inputs_are_those_of_the_definitions() -> None:
    lines = PAGE[PAGE.index("| op | fields of `inputs` |") :].splitlines()[2:]
    rows = [line.split("|")[1:3] for line in lines[: lines.index("")]]
    listed = {
        op: tuple(re.findall(r"`(\w+)`", fields))
        for ops, fields in rows
        for op in re.findall(r"`(\w+)`", ops)
    }
    assert listed == {name: op.arrays for name, op in OPS.items()}


def test_the_skeleton_of_a_package_is_the_examples() -> None:
    block = next(b for b in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "[build-system]" in b)
    example = (ROOT / "examples" / "plugin" / "pyproject.toml").read_text().splitlines()
    assert [line for line in block.splitlines() if line and line not in example] == []


def test_every_file_the_examples_page_names_is_there() -> None:
    folder = ROOT / "examples" / "plugin"
    named = re.findall(r"^\| `([\w./]+)` \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert set(named) >= {"pyproject.toml", "kdacore_example/plugin.py"}
    assert [name for name in named if not (folder / name).is_file()] == []
