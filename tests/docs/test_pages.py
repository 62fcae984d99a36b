"""The index of each folder of pages links every page in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("folder", ["design", "lab"])
def test_the_index_links_every_page(folder: str) -> None:
    index = (DOCS / folder / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)", index))
    assert {p.name for p in (DOCS / folder).glob("*.md")} - {"README.md", "architecture.md"} <= linked


def test_every_log_says_where_the_current_state_is() -> None:
    pages = [p for p in (DOCS / "lab").glob("*.md") if p.name != "README.md"]
    notes = {p.name: p.read_text().split("\n\n")[2] for p in pages}  # after the front matter and the title
    assert [name for name, note in notes.items() if not note.startswith("> This page is a log of")] == []


def test_links_into_a_page_name_a_heading_of_it() -> None:
    broken = []
    for page in DOCS.rglob("*.md"):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]*)\)", page.read_text()):
            other = page.parent / target if target else page
            if "://" not in target and anchor not in _anchors(other):
                broken.append(f"{page.relative_to(DOCS)}: {target}#{anchor}")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}
