"""Third parties' code, called so that its failures are findings and never the end of the host."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

FAULTS = (Exception, SystemExit)
"""What a plugin's code may end in while its host goes on; not KeyboardInterrupt, which is the user's."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Code of a plugin that went wrong on the way of a call: a problem of the doctor's report."""

    where: str
    what: str
    """What raised, what it raised, and the traceback; or what nonsense it answered."""


_faults: dict[tuple[str, str, str], Fault] = {}
_warned: set[tuple[str, str, str]] = set()


def report(where: str, what: str, error: BaseException) -> None:
    """Warn of an error that was caught, once for each kind of error, and keep it for the doctor.

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
    """Warn, once for these three words, of code that answered nonsense, and keep it for the doctor."""
    _faults.setdefault((where, what, kind), Fault(where, f"{what} {said}"))
    warn_once(where, what, kind, f"{what} {said}")


def warn_once(where: str, what: str, kind: str, text: str) -> None:
    """A RuntimeWarning, the first time for these three words."""
    if (where, what, kind) not in _warned:
        _warned.add((where, what, kind))
        warnings.warn(f"{where}: {text}", RuntimeWarning, stacklevel=3)


def faults() -> tuple[Fault, ...]:
    """What was reported since the set of plugins changed."""
    return tuple(_faults.values())


def clear() -> None:
    """Forget everything: the plugins are others now, or loaded anew."""
    _faults.clear()
    _warned.clear()
