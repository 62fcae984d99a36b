"""The navigation of the site names every page once, but for the lab's, which its search leaves out too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAB = sorted((ROOT / "docs/lab").glob("*.md"))


def test_every_page_is_in_the_navigation() -> None:
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p not in LAB]
    named = re.findall(r'= "([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(named) == sorted(str(p.relative_to(ROOT / "docs")) for p in pages)


@pytest.mark.parametrize("page", LAB, ids=lambda path: path.name)
def test_the_search_leaves_out_the_lab(page: Path) -> None:
    assert page.read_text().startswith("---\nsearch:\n  exclude: true\n---\n\n# ")
