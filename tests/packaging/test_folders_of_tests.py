"""Any set of the folders of tests can be collected together.

Tests import helpers of their own folder by name, and each folder puts itself on the path: a name that exists in two
folders is that of whichever was collected first.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
TESTS = Path(__file__).parents[1]


def imported(source: str) -> set[str]:
    """Top-level names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def ambiguous_imports(folder: Path) -> list[str]:
    """Imports, in files below a folder, of a module that two of its subfolders have."""
    files = sorted(folder.rglob("*.py"))
    places: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        places[file.stem].append(file.parent)
    return [
        f"{file.relative_to(folder)} imports {name}"
        for file in files
        for name in sorted(imported(file.read_text(encoding="utf-8")))
        if len(places[name]) > 1
    ]


def test_no_module_imports_another_whose_name_is_ambiguous() -> None:
    assert not ambiguous_imports(TESTS)


def test_an_ambiguous_import_is_found(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_slices.py").write_text("import numpy\n")
    (tmp_path / "one" / "test_other.py").write_text("def f():\n    from test_slices import draw\n")
    assert ambiguous_imports(tmp_path) == [f"{Path('one', 'test_other.py')} imports test_slices"]
