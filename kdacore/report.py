"""Plain aligned text for the command line: one place decides how a table looks and what an exit status means."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdacore import folding

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


def width_of(out: Console) -> int:
    """Columns that text for people may take."""
    return out.width if out.is_terminal else folding.PLAIN_WIDTH


def hanging(start: str, text: str, out: Console) -> Text:
    """As :func:`kdacore.folding.hanging`, in the width of the output."""
    return Text(folding.hanging(start, text, width_of(out)))


def wrapped(text: str, out: Console) -> Text:
    """As :func:`kdacore.folding.fold`, in the width of the output."""
    return Text(folding.fold(text, width_of(out)))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], out: Console, indent: int = 2) -> Text:
    """Left-aligned columns; numbers arrive formatted. Words with a meaning of their own are coloured.

    Args:
        headers: of the columns; all empty for none.
        rows: their cells.
        out: where it is printed. On a terminal cells are folded to its width.
        indent: blanks before each line.
    """
    body = [[str(cell) for cell in row] for row in rows]
    there = [i for i, header in enumerate(headers) if header or any(row[i] for row in body)]
    headers, body = [headers[i] for i in there], [[row[i] for i in there] for row in body]
    return _folded(headers, body, out, indent) if out.is_terminal else _plain(headers, body, indent)


def _folded(headers: Sequence[str], body: Sequence[Sequence[str]], out: Console, indent: int) -> Text:
    made = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=any(headers), header_style="bold"
    )
    for header in headers:
        made.add_column(header, overflow="fold")
    for row in body:
        made.add_row(*[Text(cell, style=_STYLES.get(cell, "")) for cell in row])
    width = out.options.update(width=out.width - indent, no_wrap=False, overflow="fold")
    text = Text()
    for line in out.render_lines(made, width, pad=False):
        text.append(" " * indent)
        for segment in line:
            text.append(segment.text, style=segment.style)
        text.append("\n")
    return text


def _plain(headers: Sequence[str], body: Sequence[Sequence[str]], indent: int) -> Text:
    widths = [max(len(line[i]) for line in [list(headers), *body]) for i in range(len(headers))]
    text = Text()
    if any(headers):
        text.append(_line(headers, widths, indent), style="bold")
    for row in body:
        text.append(" " * indent)
        for i, cell in enumerate(row):
            text.append(cell.ljust(widths[i] + 2), style=_STYLES.get(cell, ""))
        text.rstrip()
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
