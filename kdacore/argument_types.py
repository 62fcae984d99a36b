"""Types of command-line arguments: argparse turns their errors into exit status 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

from kdacore.errors import did_you_mean


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from ``least`` (0 or more) on. argparse turns the error into exit status 2."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return number


def one_of(names: Iterable[str], what: str) -> Callable[[str], str]:
    """One of some names. argparse turns the error, which has the nearest of them, into exit status 2."""
    known = tuple(names)

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"no {what} {text!r}{_nearest(text, known)}")
        return text

    return name


def _nearest(text: str, known: tuple[str, ...]) -> str:
    """The names that a word may stand for: the most similar one, those that contain it, else all."""
    if nearest := did_you_mean(text, known):
        return nearest
    containing = [name for name in known if text and text.lower() in name.lower()]
    if len(containing) == 1:
        return f"; did you mean {containing[0]!r}?"
    return f"; there are {', '.join(containing or known)}"


def positive(text: str) -> float:
    """A number above 0, infinity included. argparse turns the error into exit status 2."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number
