"""Types of command-line arguments: argparse turns their errors into exit status 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from ``least`` (0 or more) on. argparse turns the error into exit status 2."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return number


def positive(text: str) -> float:
    """A number above 0, infinity included. argparse turns the error into exit status 2."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number
