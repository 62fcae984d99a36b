"""The table of questions on the architecture page leads to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "architecture.md"
ROWS = re.findall(r"^\| (.+?) \| `([^`]+)` \|$", PAGE.read_text().split("\n## Which file")[1], re.MULTILINE)


def test_there_are_as_many_questions_as_are_read() -> None:
    """More than these nobody looks through."""
    assert 20 <= len(ROWS) <= 40
    table = PAGE.read_text().split("\n## Which file")[1].split("\n## ")[0]
    assert len(ROWS) == sum(line.startswith("| ") for line in table.splitlines()) - 1
    assert len({question for question, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("question", "path"), ROWS, ids=[path for _, path in ROWS])
def test_the_file_exists(question: str, path: str) -> None:
    assert (ROOT / path).is_file(), f"{question} {path}"


def test_every_file_of_the_page_and_picture_exists() -> None:
    named = re.findall(r"`((?:kdacore|backends|tests|docs)/[\w/.]+)`", PAGE.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []
