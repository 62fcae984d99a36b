"""Failures of plugins: reported once as a warning, kept for ``kdacore doctor``; they must not crash the process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

FAULTS = (Exception, SystemExit)
"""What is caught when a plugin's code is called. KeyboardInterrupt is not: it is the user's."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure of a plugin's code during a call; ``kdacore doctor`` reports it as a problem."""

    where: str
    what: str
    """What raised, the error and its traceback; or the invalid answer."""


_faults: dict[tuple[str, str, str], Fault] = {}
_warned: set[tuple[str, str, str]] = set()


def report(where: str, what: str, error: BaseException) -> None:
    """Warn of an error that was caught, once for each type of error, and keep it for the doctor.

    Args:
        where: the backend or plugin whose code it is.
        what: the code, in words.
        error: what it raised.
    """
    import traceback  # here: `import kdacore` stays light

    text = "".join(traceback.format_exception(error))
    _faults.setdefault((where, what, type(error).__name__), Fault(where, f"{what} raised {error!r}\n{text}"))
    warn_once(where, what, type(error).__name__, f"{what} raised:\n{text}")


def complain(where: str, what: str, kind: str, said: str) -> None:
    """Warn once of an invalid answer, and keep it for the doctor."""
    _faults.setdefault((where, what, kind), Fault(where, f"{what} {said}"))
    warn_once(where, what, kind, f"{what} {said}")


def warn_once(where: str, what: str, kind: str, text: str) -> None:
    """Give a RuntimeWarning the first time it is called with these ``where``, ``what`` and ``kind``."""
    if (where, what, kind) not in _warned:
        _warned.add((where, what, kind))
        warnings.warn(f"{where}: {text}", RuntimeWarning, stacklevel=3)


def faults() -> tuple[Fault, ...]:
    """The failures reported since the set of plugins last changed."""
    return tuple(_faults.values())


def clear() -> None:
    """Forget all failures; called when the set of plugins changes."""
    _faults.clear()
    _warned.clear()
