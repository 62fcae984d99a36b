"""Nothing lies in benchmarks/results or docs/images that nothing names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCES = [
    path
    for pattern in ("benchmarks/**/*.py", "tests/**/*.py", "kdacore/**/*.py", "backends/*/kdacore_*/**/*.py")
    for path in ROOT.glob(pattern)
]
RECORDS = sorted(RESULTS.glob("*/*.json"))
MACHINES = {path.parent.name for path in RECORDS}
TEXT = "\n".join(path.read_text() for path in [*PAGES, *SOURCES])


def _is_named(record: Path) -> bool:
    """By its folder and name, with or without the ending, or by a name that no other folder has."""
    name = str(record.relative_to(RESULTS).with_suffix(""))
    if re.search(rf"\b{re.escape(name)}\b(?!-)", TEXT):
        return True
    alone = sum(other.name == record.name for other in RECORDS) == 1
    return alone and re.search(rf"(?<![\w-]){re.escape(record.name)}", TEXT) is not None


def test_there_are_records() -> None:
    assert len(RECORDS) > 30


def test_every_record_is_named_by_a_page_a_test_or_a_script() -> None:
    assert [str(path.relative_to(ROOT)) for path in RECORDS if not _is_named(path)] == []


def test_pages_name_records_that_exist() -> None:
    """But for the lab, whose logs name what is only in git's history."""
    pages = [path for path in PAGES if path.parent.name != "lab"] + [RESULTS / "README.md"]
    wrong = []
    for page in pages:
        for name in re.findall(r"`(?:benchmarks/results/)?([\w-]+/[\w-]+\.json)`", page.read_text()):
            if name.split("/")[0] in MACHINES and not (RESULTS / name).exists():
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
        for name in re.findall(r"`([\w-]+\.json)`", page.read_text()):
            if not any(record.name == name for record in RECORDS) and not any(
                ROOT.glob(f"backends/**/{name}")
            ):
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert wrong == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_record_of_one_preset_is_named_by_it(record: Path) -> None:
    contents = json.loads(record.read_text())
    presets = contents.get("presets") or []
    rows = contents.get("rows") or []
    used = {row["preset"] for row in rows if isinstance(row, dict) and "preset" in row}
    assert len(presets) <= 1 and used <= set(presets or used)
    if "runs" in contents and presets:
        assert record.stem == presets[0]


def test_every_picture_is_shown_by_a_page() -> None:
    shown = set(re.findall(r"images/([\w.-]+)\)", "\n".join(path.read_text() for path in PAGES)))
    assert sorted(path.name for path in IMAGES.iterdir() if path.name not in shown) == []
