"""Pictures of results: one bar for each contender of each case. Needs matplotlib (the ``bench`` extra)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from kdacore.bench.palette import colours_of
from kdacore.bench.results import duration
from kdacore.lazy import install_line

WIDE_RANGE = 1000.0
"""Medians further apart than this are drawn on a logarithmic axis."""


NO_LIBRARY = f"drawing needs matplotlib: {install_line('bench')}"


class PlotError(RuntimeError):
    """There is nothing to draw with, or nothing to draw."""


def draw(document: dict[str, Any], path: Path) -> None:
    """Write an SVG of the timed rows of one results document."""
    matplotlib, pyplot = library()
    rows = [row for row in document["rows"] if row["seconds"] is not None]
    if not rows:
        raise PlotError("no row of these results was timed")
    groups = list(dict.fromkeys(_group(row) for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    colour = colours_of(contenders)
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.3 * len(rows) + 0.15 * len(groups)))
    longest = max(row["seconds"] for row in rows)
    unit, scale = ("milliseconds", 1e3) if longest >= 1e-3 else ("microseconds", 1e6)
    y, ticks = 0.0, []
    for group in groups:
        mine = [row for row in rows if _group(row) == group]
        ticks.append(y + (len(mine) - 1) / 2)
        for row in mine:
            axes.barh(y, row["seconds"] * scale, height=0.8, color=colour[row["contender"]])
            axes.text(row["seconds"] * scale, y, f" {duration(row['seconds'])}", va="center", fontsize=8)
            y += 1
        y += 0.6
    if longest / min(row["seconds"] for row in rows) > WIDE_RANGE:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_ylim(-0.8, y - 0.4)
    axes.invert_yaxis()
    axes.set_yticks(ticks, groups)
    axes.set_xlabel(f"{unit}, median ({where(document)})")
    axes.spines[["top", "right"]].set_visible(False)
    if len(contenders) > 1:
        handles = [matplotlib.patches.Patch(color=colour[name], label=name) for name in contenders]
        axes.legend(handles=handles, loc="lower left", ncols=3, frameon=False, bbox_to_anchor=(0, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def library() -> tuple[Any, Any]:
    """matplotlib and its pyplot, set up for SVG files that are the same each time."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        raise PlotError(NO_LIBRARY) from None
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "kdacore", "svg.fonttype": "path", "font.size": 9})
    importlib.import_module("matplotlib.patches")
    return matplotlib, importlib.import_module("matplotlib.pyplot")


def _group(row: dict[str, Any]) -> str:
    """What stands beside the bars of a row; training, decode and host rows of one name are not the same case.

    The launches of one call are one group: the contender, which the legend names, says which.
    """
    phase = row["phase"]
    launch = phase not in ("backward", "training") and phase in row["contender"].split()
    said = launch or phase in ("forward", "stage") or phase in row["case"]
    name = row["case"] if said else f"{row['case']}, {phase}"
    return f"{name}\n{row['gates']} gates" if row["gates"] else name


def where(document: dict[str, Any]) -> str:
    """The hardware, in a few words."""
    machine = document["machine"]
    driver = machine.get("nvidia driver", "")
    if driver and not driver.startswith(("none", "nvidia-smi", "failed")):
        return str(driver.split(",")[0])
    return str(machine.get("cpu", ""))
