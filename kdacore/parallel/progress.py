"""What one rank has done on a group: the calls that it began, those that all ranks agreed on, and whose turn it is.

Calls are counted. Ranks that make the same calls in the same order have the same count, so the number of a call tells
on every rank whether the others are at the same one.
"""

from __future__ import annotations

import threading
from typing import Any


class Progress:
    """What one rank knows of its own calls on one group."""

    __slots__ = ("agreed", "calls", "in_step", "lock")

    def __init__(self) -> None:
        self.calls = 0
        """Calls that began here, refused ones too."""
        self.agreed: set[Any] = set()
        """Descriptions of calls that the ranks have found to be the same."""
        self.in_step: dict[Any, Any] = {}
        """A flag on each device: False once an exchange there was between ranks that were not at the same call."""
        self.lock = threading.RLock()

    def begin(self) -> int:
        """Count a call. Returns its number, from 1."""
        self.calls += 1
        return self.calls


class Turn:
    """Wait until no other thread of this rank is at a call. The value is False if one was: which of the two the other
    ranks' calls belong to is then not known."""

    __slots__ = ("lock",)

    def __init__(self, progress: Progress) -> None:
        self.lock = progress.lock

    def __enter__(self) -> bool:
        return self.lock.acquire(blocking=False) or not self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()
