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
            there = f"there are {', '.join(known)}"
            raise argparse.ArgumentTypeError(f"no {what} {text!r}; {there}{did_you_mean(text, known)}")
        return text

    return name


def positive(text: str) -> float:
    """A number above 0, infinity included. argparse turns the error into exit status 2."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number
