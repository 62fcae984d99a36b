"""Pictures of times by number of heads: a line for each form, a panel for each length and gate. Needs matplotlib."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kdacore.bench.palette import colours_of
from kdacore.bench.plot import library, where

PANEL_WIDTH, PANEL_HEIGHT = 7.5, 4.2
"""Inches."""


def series(document: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Panel -> contender -> (heads, seconds), by heads. A panel is the case without its number of heads."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in document["rows"]:
        heads = re.search(r" H(\d+)\b", row["case"])
        if heads is None:
            raise ValueError(f"a case without heads: {row['case']}")
        panel = row["case"].replace(heads[0], "")
        points = found.setdefault(panel, {}).setdefault(row["contender"], [])
        points.append((int(heads[1]), row["seconds"]))
    return {panel: {name: sorted(p) for name, p in lines.items()} for panel, lines in found.items()}


def draw_by_heads(document: dict[str, Any], path: Path) -> None:
    """Write an SVG of the rows of one results document, all of them timed."""
    _, pyplot = library()
    panels = series(document)
    size = (PANEL_WIDTH, PANEL_HEIGHT * len(panels))
    figure, grid = pyplot.subplots(len(panels), squeeze=False, figsize=size, layout="constrained")
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colour = colours_of(names)
    for axes, (panel, lines) in zip(grid[:, 0], panels.items(), strict=True):
        longest = max(seconds for points in lines.values() for _, seconds in points)
        unit, scale = ("milliseconds", 1e3) if longest >= 1e-3 else ("microseconds", 1e6)
        for name, points in lines.items():
            heads, seconds = zip(*points, strict=True)
            axes.plot(heads, [scale * s for s in seconds], marker="o", ms=3, color=colour[name], label=name)
        axes.set_title(panel, fontsize=9, loc="left")
        axes.set_xticks(sorted({heads for points in lines.values() for heads, _ in points}))
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{unit}, median")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=7)
    grid[-1, 0].set_xlabel(f"heads ({where(document)})")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
