"""docs/guide/writing-a-backend.md and the code say the same: reason codes, checks, commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

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


def test_the_entry_point_is_the_example_s_own() -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    assert block[1] in (ROOT / "examples" / "plugin" / "pyproject.toml").read_text()
