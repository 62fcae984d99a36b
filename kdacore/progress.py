"""The progress bar of every command, on standard error; it shows how far within a piece of work the command has come.

The code that does the work need not know of a bar: :func:`within` reports to the one that is shown, if there is one.
"""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_AFTER = 30.0
"""Seconds between lines where standard error is no terminal, which has no bar."""

_shown: ContextVar[Bar | None] = ContextVar("kdacore_progress", default=None)


def within(fraction: float) -> None:
    """Report that this part of the current piece of work is done. A smaller one than before changes nothing."""
    bar = _shown.get()
    if bar is not None:
        bar.within(fraction)


class Bar:
    """A bar of so many pieces of work. Use it in a ``with`` statement. Where standard error is a file or a pipe, a line
    says now and then how far the work is.

    Args:
        what: what is done; :meth:`begin` replaces it.
        total: pieces of work.
        done: of them when the bar begins.
        show: False for no output.
        transient: the bar is removed when it is done.
    """

    def __init__(
        self, what: str, total: int, *, done: int = 0, show: bool = True, transient: bool = True
    ) -> None:
        self._what, self._total, self._done = what, total, done
        self._show, self._transient = show, transient
        self._counts, self._part = "", 0.0
        self._begun = self._said = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._token: Token[Bar | None] | None = None

    def __enter__(self) -> Bar:
        from rich.console import Console  # here: few commands have a bar
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True)
        self._progress = Progress(
            *columns, console=console, transient=self._transient, disable=not self._show
        )
        self._task = self._progress.add_task(self._what, total=self._total, counts="", completed=self._done)
        self._progress.start()
        self._token = _shown.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            _shown.reset(self._token)
        if self._progress is not None:
            self._progress.stop()

    def begin(self, what: str, *, done: int | None = None) -> None:
        """Say what the next piece of work is, and how many are done where that is not one more than before."""
        self._what, self._part = what, 0.0
        self._done = self._done if done is None else done
        self._update()

    def advance(self, counts: str = "") -> None:
        """A piece of work is done. ``counts``: what is said of those so far."""
        self._done, self._part, self._counts = self._done + 1, 0.0, counts
        self._update()

    def within(self, fraction: float) -> None:
        """As the function of this name, of this bar."""
        self._part = max(self._part, min(fraction, 1.0))
        self._update()

    def print(self, text: str) -> None:
        """Print a line above the bar, if it is shown."""
        if self._progress is not None and self._show:
            self._progress.console.print(text, markup=False, highlight=False)

    @property
    def completed(self) -> float:
        """Pieces of work that are done, with the part of the current one."""
        return self._done + self._part

    def _update(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, description=self._what, completed=self.completed, counts=self._counts
            )
            now = time.monotonic()
            if now - self._said >= LINE_AFTER and not self._progress.console.is_terminal:
                self._said = now
                said = f"{self._what}: {self._done} of {self._total} {self._counts}".rstrip()
                self.print(f"{said}, {now - self._begun:.0f} s")
