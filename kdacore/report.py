"""Plain aligned text for the command line: one place decides how a table looks and what an exit status means."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

OK = 0
BROKEN = 1
"""Something installed is broken, wrong, or cannot do what was asked."""
USAGE = 2
"""The command itself makes no sense."""
INTERRUPTED = 130
"""Ctrl-C, by the shell's convention."""

_STYLES = {
    "ok": "green",
    "yes": "green",
    "available": "green",
    "verified": "green",
    "problem": "bold red",
    "wrong": "bold red",
    "FAILED": "bold red",
    "no": "dim",
    "skipped": "yellow",
    "disabled": "yellow",
    "compiled only": "yellow",
}


def console(file: Any = None) -> Console:
    """Colour on a terminal, plain text elsewhere; lines are never wrapped, so that they can be searched."""
    return Console(file=file or sys.stdout, soft_wrap=True, highlight=False, markup=False)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 2) -> Text:
    """Left-aligned columns; numbers arrive formatted. Words with a meaning of their own are coloured."""
    body = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *body]) for i in range(len(headers))]
    text = Text()
    if any(headers):
        text.append(_line(headers, widths, indent), style="bold")
    for row in body:
        text.append(" " * indent)
        for i, cell in enumerate(row):
            last = i == len(row) - 1
            text.append(cell if last else cell.ljust(widths[i] + 2), style=_STYLES.get(cell, ""))
        text.append("\n")
    return text


def _line(cells: Sequence[str], widths: Sequence[int], indent: int) -> str:
    padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"{' ' * indent}{padded}".rstrip() + "\n"


def heading(title: str) -> Text:
    """The title of a section."""
    return Text(f"{title}\n", style="bold cyan")


def size(count: float) -> str:
    """Bytes in words: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
