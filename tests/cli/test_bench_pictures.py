"""Pictures of records that are not bars of contenders by case."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import bar_charts, by_heads, plot
from benchmarks.plot import forms_apart
from kdacore.bench.palette import OTHERS, OWN, colours_of

ROOT = Path(__file__).parents[2]

SHORT, LONG = "B1 T512 H{} K128 V128 sigmoid", "B1 T8192 H{} K128 V128 sigmoid"


def row(case: str, contender: str, seconds: float) -> dict[str, Any]:
    return {"case": case, "contender": contender, "seconds": seconds}


def test_lines_go_by_heads_and_panels_by_all_else() -> None:
    rows = [
        row(LONG.format(h), name, h * s) for h in (16, 4) for name, s in (("segments", 1.0), ("fused", 2.0))
    ]
    rows.append(row(SHORT.format(8), "segments", 0.5))
    assert by_heads.series({"rows": rows}) == {
        LONG.format(0).replace(" H0", ""): {
            "segments": [(4, 4.0), (16, 16.0)],
            "fused": [(4, 8.0), (16, 32.0)],
        },
        SHORT.format(0).replace(" H0", ""): {"segments": [(8, 0.5)]},
    }


def test_a_case_without_heads_is_named() -> None:
    with pytest.raises(ValueError, match="B1 T512 K128"):
        by_heads.series({"rows": [row("B1 T512 K128", "segments", 1.0)]})


def test_lines_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(case.format(h), "segments", h * 1e-6) for case in (SHORT, LONG) for h in (4, 8)]
    for name in ("a.svg", "b.svg"):
        by_heads.draw_by_heads({"rows": rows, "machine": {"cpu": "a processor"}}, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_bytes()
    assert b"<svg" in drawn and drawn == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("contender", "case", "launch"),
    [
        ("segments-of-22 maps", "B1 T64, segments of 22 chunks", "maps"),
        ("chains scan", "B1 T64, chains", "scan"),
        ("cuda forward", "B1 T64, cuda", "forward"),
    ],
)
def test_a_form_of_launches_is_a_case(contender: str, case: str, launch: str) -> None:
    got = forms_apart({"rows": [row("B1 T64", contender, 1.0)], "machine": {}})
    assert got == {"rows": [row(case, launch, 1.0)], "machine": {}}


@pytest.mark.parametrize(
    ("record", "more"),
    [("h200/few-heads", ["--by-heads"]), ("h200/jax-calls", []), ("h200/h200-heads", [])],
)
def test_a_committed_record_is_drawn(
    record: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    source, picture = ROOT / f"benchmarks/results/{record}.json", tmp_path / "picture.svg"
    monkeypatch.setattr(sys, "argv", ["plot", str(source), str(picture), *more])
    plot.main()
    assert "<svg" in picture.read_text()


def test_a_current_record_says_where_its_last_run_was() -> None:
    record = {"rows": [], "runs": [{"commit": "a"}, {"commit": "b", "machine": {}}]}
    assert plot.of_last_run(record) == {**record, "commit": "b", "machine": {}}


def test_a_contender_has_its_colour_in_every_picture() -> None:
    alone = colours_of(["kdacore cuda", "fla-core 0.6.0"])
    beside = colours_of(["fla-core 0.7.0", "kdacore triton", "a form", "kdacore cuda"])
    assert alone["kdacore cuda"] == beside["kdacore cuda"] == bar_charts.COLOURS["kdacore cuda"]
    assert alone["fla-core 0.6.0"] == beside["fla-core 0.7.0"] == bar_charts.COLOURS["fla-core"]
    many = [f"form {i}" for i in range(len(OTHERS))]
    assert len(set(colours_of([*many, "kdacore cuda"]).values())) == len(many) + 1
    assert len(colours_of([*many, "one more"])) == len(many) + 1
    two = colours_of(["kdacore cuda, fused", "kdacore cuda, segments", "kdacore cuda"])
    assert len(set(two.values())) == 3
    assert not set(OTHERS) & set(OWN.values())


PICTURES = [
    path for path in sorted((ROOT / "docs" / "images").glob("*.svg")) if "matplotlib" in path.read_text()
]
LEGEND_ENTRY = re.compile(
    r"<g id=\"(?:patch|line2d)_\d+\">\n\s+<path [^>]*?(?:fill: (#\w{6})|fill: none; stroke: (#\w{6}))[^>]*/>"
    r".*?<g id=\"text_\d+\">\n\s*<!-- (.*?) -->",
    re.DOTALL,
)


def legend(picture: Path) -> dict[str, str]:
    """The colours of the contenders that a picture names."""
    _, _, text = picture.read_text().partition('<g id="legend_')
    return {name: fill or stroke for fill, stroke, name in LEGEND_ENTRY.findall(text)}


def test_legends_are_found() -> None:
    assert sum(bool(legend(picture)) for picture in PICTURES) > 50


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_committed_picture_has_the_colours_of_the_palette(picture: Path) -> None:
    """Those of earlier palettes too, whose records are in git's history."""
    named = legend(picture)
    assert named == colours_of(named)
    used = set(re.findall(r"#[0-9a-f]{6}(?=[;\"])", picture.read_text()))
    assert used <= {*OWN.values(), *OTHERS, "#ffffff", "#000000", "#b0b0b0"}


def test_a_contender_has_one_colour_in_all_committed_pictures() -> None:
    colours: dict[str, set[str]] = {}
    for picture in PICTURES:
        for name, colour in legend(picture).items():
            colours.setdefault(name, set()).add(colour)
    assert {name: found for name, found in colours.items() if len(found) > 1} == {}
