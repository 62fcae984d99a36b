"""SIGTERM, which ``timeout`` and batch systems send at a time limit.

Only the main thread may set a signal's handler; in others these do nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

AGAIN = 1.0
"""Seconds. ``timeout`` sends the signal to the process and then to its group, which the process is in, too."""

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def terminated_as_interrupted() -> AbstractContextManager[None]:
    """Inside, it raises KeyboardInterrupt as Ctrl-C does: ``bench`` then writes what it has timed so far.

    Sent again within a second it does nothing, so that it does not interrupt that writing.
    """
    last = float("-inf")

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= AGAIN:
            last = now
            raise KeyboardInterrupt

    return _handled(interrupt)


def not_terminated() -> AbstractContextManager[None]:
    """Inside, it is ignored: while results that took minutes are written, which takes seconds."""
    return _handled(signal.SIG_IGN)
