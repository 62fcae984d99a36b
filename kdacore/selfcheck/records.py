"""The kept records of self-checks: small JSON files in the cache folder, read as if anybody had written them.

Auto uses a kernel on the word of such a file, so it and its folder must be this user's or root's, and writable
by nobody else. Whatever else lies there counts as no record, and the check runs again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any, TypedDict

from kdacore import files

_LIMIT = 1 << 14
"""Bytes; a record has a few hundred."""


class Record(TypedDict):
    """What a check found."""

    error: float
    """Relative error of the result nearest its bound, or farthest beyond."""
    bound: float
    failure: str
    """What was raised; such a record is not kept."""
    misfit: str
    """Results that are missing, unasked for, or of another dtype, which no error is small enough for."""


def read(path: Path) -> Record | None:
    """The record in a file; None where there is none that can be believed."""
    try:
        found = json.loads(files.read_ours(path, _LIMIT))
    except (OSError, ValueError, RecursionError):  # absent, torn, or nested deeper than JSON is read
        return None
    return _checked(found)


def write(path: Path, record: Record) -> None:
    """Keep a record. Where it cannot be written, the next process checks again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not files.is_ours(path.parent.stat()):
            os.chmod(path.parent, 0o700)  # ours, and made where others may write; OSError when it is not ours
        files.remove_stale(path.parent)
        files.write_whole(path, json.dumps(record))


def _checked(found: Any) -> Record | None:
    """A record of the right fields, types and ranges, that does not contradict itself."""
    if not isinstance(found, dict) or set(found) != set(Record.__annotations__):
        return None
    error, bound, misfit = _number(found["error"]), _number(found["bound"]), found["misfit"]
    if error is None or bound is None or math.isinf(bound) or not isinstance(misfit, str):
        return None
    if found["failure"] != "" or (misfit and error < bound):
        return None
    return Record(error=error, bound=bound, failure="", misfit=misfit)


def _number(x: object) -> float | None:
    """A number of 0 or more, infinity among them."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return None
    try:
        number = float(x)
    except OverflowError:  # an integer of many digits
        return None
    return number if number >= 0 else None
