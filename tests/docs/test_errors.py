"""docs/guide/calling.md lists every error a call can raise, and the README what the tests need besides Python."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "DemoError",
    "DisagreementError",
    "NothingServedError",
    "PlotError",
    "StaleTableError",
    "TableError",
}
"""Of the commands, which report them themselves; of cost tables, which are ignored with a warning."""


def test_every_error_is_in_the_table() -> None:
    sources = [*ROOT.glob("kdacore/**/*.py"), *ROOT.glob("backends/*/kdacore_*/**/*.py")]
    defined = re.compile(r"^class (\w+)\(\w*(?:Error|Exception)\)", re.MULTILINE)
    ours = {name for f in sources for name in defined.findall(f.read_text())} - ELSEWHERE
    rows = re.findall(r"^\| `(\w+)`", (ROOT / "docs/guide/calling.md").read_text(), re.MULTILINE)
    assert ours <= set(rows)


def test_the_readme_names_the_compilers_that_the_tests_call() -> None:
    sources = [f for f in ROOT.glob("tests/**/*.py") if f != Path(__file__)]
    called = {name for f in sources for name in re.findall(r'"(gcc|g\+\+|clang|nvcc)"', f.read_text())}
    tests = (ROOT / "README.md").read_text().split("\nThe tests.", 1)[1].split("```", 1)[0]
    assert called == {name for name in ("gcc", "g++", "clang", "nvcc") if f"`{name}`" in tests}
