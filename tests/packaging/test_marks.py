"""Tests carry their own marks: no file beside them lists tests by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "tests").rglob("conftest.py"), ROOT / "pyproject.toml"]


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_list_of_test_names(file: Path) -> None:
    assert re.findall(r"""["'](?:[\w/]*::)?test_\w+(?:\[.*?\])?["']""", file.read_text()) == []
