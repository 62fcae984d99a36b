"""The navigation of the site names every page once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_page_is_in_the_navigation() -> None:
    pages = sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))
    named = re.findall(r'= "([\w/.-]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(named) == pages
