"""Standard output and error of commands, whose readers may be gone: the exit status is the command's own then too."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class _ForReaders:
    """A text stream. What is written after its reader left, as ``| head`` does, goes nowhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._error: OSError | None = None
        """The error of a write that failed: argparse, for one, passes over it."""

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def finish(self) -> None:
        """Write what is left. OSError where that, or something before, could not be written."""
        self.flush()
        if self._error is not None:
            raise self._error

    def _lose(self, error: OSError) -> None:
        """Let the file descriptor name the null device: what is still buffered, and all that follows, goes there."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            self._error = error
            raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def for_readers() -> Iterator[None]:
    """Inside, a stream whose reader left, or that the shell closed (``>&-``), takes what is printed, and loses it.

    Raises:
        OSError: at the end, where the rest of what was printed cannot be written (a full disk, say).
    """
    before = sys.stdout, sys.stderr
    closed = [open(os.devnull, "w") for stream in before if stream is None]  # noqa: SIM115  None: the shell closed it
    opened = iter(closed)
    streams: list[Any] = [_ForReaders(next(opened) if stream is None else stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        try:
            streams[0].finish()
        finally:
            streams[1].flush()
            for stream in closed:
                stream.close()
