"""docs/performance.md and the README's headline say what the committed results say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = (
    "benchmarks/*.py",
    "benchmarks/results/*/*.json",
    "docs/performance.md",
    "docs/images/*",
    "README.md",
)


def _check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.performance_page", "--check"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def test_the_page_is_what_the_script_would_write() -> None:
    ran = _check(ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_pages_show_every_picture_of_the_script() -> None:
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs/performance.md").read_text()
    images = ROOT / "docs" / "images"
    pictures = [images / "headline.svg", *images.glob("performance-*.svg")]
    assert [p.name for p in pictures if f"images/{p.name})" not in pages] == []


def test_check_names_what_is_out_of_date(tmp_path: Path) -> None:
    for pattern in INPUTS:
        for file in ROOT.glob(pattern):
            copy = tmp_path / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    page, picture = tmp_path / "docs/performance.md", tmp_path / "docs/images/headline.svg"
    text = page.read_text()
    changed = re.sub(r"\*\*\d+\.\d+\*\*", "**98765.0**", text, count=1)
    assert changed != text, "no figure of ours on the page"
    page.write_text(changed)
    picture.unlink()
    before = page.read_bytes()
    ran = _check(tmp_path)
    assert ran.returncode == 1
    assert ran.stdout.splitlines() == ["stale: docs/performance.md", "stale: docs/images/headline.svg"]
    assert page.read_bytes() == before, "--check writes nothing"


def test_the_table_of_jax_shows_the_kernels_through_jax() -> None:
    """From their record: what automatic choice takes, not what it would fall back to alone."""
    record = json.loads((ROOT / "benchmarks/results/h200/jax-calls.json").read_text())
    seconds = {row["case"]: row["seconds"] for row in record["rows"] if row["contender"] == "jax"}
    table = (ROOT / "docs/performance.md").read_text().split("<!-- jax:begin -->")[1].split("<!-- jax:end")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    column = lines[0].index("cuda (JAX)")
    shown = {line[0].removesuffix(" unbounded"): line[column] for line in lines[2:] if line[column]}
    assert sorted(shown) == sorted(
        case for case in seconds if not case.startswith("host") and "busy thread" not in case
    )
    for case, milliseconds in shown.items():
        assert float(milliseconds) == pytest.approx(seconds[case] * 1e3, rel=5e-3), case
