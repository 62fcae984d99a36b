"""Text for people, cut into lines of a width."""

from __future__ import annotations

import textwrap

PLAIN_WIDTH = 100
"""Columns of what people read where there is no terminal, whose own width counts."""


def hanging(start: str, text: str, width: int) -> str:
    """A line that begins with ``start``. Further lines are indented by its length, at most a third of the width."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * min(len(start), width // 3),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) or start.rstrip()


def fold(text: str, width: int = PLAIN_WIDTH) -> str:
    """The lines of a text; what is longer than the width goes on in indented lines."""
    lines = text.splitlines()
    indents = [line[: len(line) - len(line.lstrip(" ->"))] for line in lines]
    return "\n".join(
        hanging(indent, line[len(indent) :], width) if len(line) > width else line
        for indent, line in zip(indents, lines, strict=True)
    )
