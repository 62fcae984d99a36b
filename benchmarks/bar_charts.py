"""Bar charts as SVG text, the same bytes each time and without a drawing library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from kdacore.bench.palette import OWN

BAR, GAP, LEFT, RIGHT, WIDTH = 14, 10, 262, 130, 892
"""Pixels: height of a bar, space between groups, margins, whole width."""
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
COLOURS = {**OWN, "one host": OWN["kdacore cuda"], "several hosts": OWN["kdacore triton"]}


@dataclass(frozen=True)
class Bar:
    series: str
    length: float
    """Times the floor, at least 1."""
    label: str


@dataclass(frozen=True)
class Group:
    name: str
    bars: tuple[Bar, ...]


def draw(title: str, groups: list[Group]) -> str:
    """Horizontal bars in groups on a logarithmic axis that begins at the floor."""
    longest = max(bar.length for group in groups for bar in group.bars)
    last = math.ceil(math.log2(longest * 1.02))
    scale = (WIDTH - LEFT - RIGHT) / last
    parts: list[str] = []
    top = 64.0
    y = top
    for group in groups:
        middle = y + len(group.bars) * BAR / 2 + 4
        parts.append(f"<text x='{LEFT - 8}' y='{middle:g}' text-anchor='end'>{escape(group.name)}</text>")
        for bar in group.bars:
            length = max(math.log2(bar.length) * scale, 2)
            parts.append(
                f"<rect x='{LEFT}' y='{y:g}' width='{length:.1f}' height='{BAR - 2}' fill='{COLOURS[bar.series]}'/>"
            )
            parts.append(
                f"<text x='{LEFT + length + 5:.1f}' y='{y + BAR - 4:g}' font-size='11'>{escape(bar.label)}</text>"
            )
            y += BAR
        y += GAP
    bottom = y - GAP + 4
    axis = []
    for power in range(last + 1):
        x = LEFT + power * scale
        axis.append(f"<path d='M{x:.1f} {top - 6:g}V{bottom:g}' stroke='#d5d9de'/>")
        axis.append(
            f"<text x='{x:.1f}' y='{bottom + 15:g}' text-anchor='middle' fill='#555'>{2**power}x</text>"
        )
    axis.append(f"<path d='M{LEFT} {top - 6:g}V{bottom:g}' stroke='#333'/>")
    height = bottom + 26
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height:g}' "
            f"viewBox='0 0 {WIDTH} {height:g}' font-size='12' {FONT} fill='#1b1f24'>",
            f"<rect width='{WIDTH}' height='{height:g}' fill='#ffffff'/>",
            f"<text x='8' y='20' font-size='14' font-weight='600'>{escape(title)}</text>",
            *_legend(groups),
            *axis,
            *parts,
            "</svg>",
            "",
        ]
    )


def _legend(groups: list[Group]) -> list[str]:
    series = list(dict.fromkeys(bar.series for group in groups for bar in group.bars))
    parts = []
    x = float(LEFT)
    for name in series:
        parts.append(f"<rect x='{x:g}' y='34' width='12' height='12' fill='{COLOURS[name]}'/>")
        parts.append(f"<text x='{x + 17:g}' y='44'>{escape(name)}</text>")
        x += 40 + 7.2 * len(name)
    return parts
