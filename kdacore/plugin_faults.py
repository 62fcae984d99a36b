"""Running code of plugins: what it raises neither ends the process nor runs the caller's program twice.

Failures are reported once as a warning and kept for ``kdacore doctor``. KeyboardInterrupt is the user's and passes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

from kdacore import errors
from kdacore.errors import PluginError, list_names

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure of a plugin's code during a call; ``kdacore doctor`` reports it as a problem."""

    where: str
    what: str
    """What raised, the error and its traceback; or the invalid answer."""


# --- running it ---------------------------------------------------------------------------------------------------


def attempt(code: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Call code of a plugin.

    A child process that the code forks must not come back from it, since it would go on with the caller's program. It
    is ended here.

    Returns:
        The answer and None, or None and what was raised.
    """
    forks = _forks
    try:
        answer = code(*arguments)
    except BaseException as error:
        if forks is not _forks:
            _end_child(error)
        if isinstance(error, KeyboardInterrupt):
            raise
        return None, error
    if forks is not _forks:
        _end_child(None)
    return answer, None


def first_answer(
    codes: Sequence[Callable[[Any], Any]], start: int, argument: Any
) -> tuple[int, Any, BaseException | None]:
    """Call functions of a plugin in turn, as :func:`attempt` does, up to the first that answers or raises something.

    Args:
        codes: the functions.
        start: the number of the first that is called.
        argument: of all of them.

    Returns:
        The number of the function, what it answered and what it raised; ``len(codes)`` where all answered None.
    """
    forks, i, answer = _forks, start, None
    try:
        for i in range(start, len(codes)):
            answer = codes[i](argument)
            if answer is not None or forks is not _forks:
                break
        else:
            i = len(codes)
    except BaseException as error:
        if forks is not _forks:
            _end_child(error)
        if isinstance(error, KeyboardInterrupt):
            raise
        return i, None, error
    if forks is not _forks:
        _end_child(None)
    return i, answer, None


_forks = object()
"""Another object in every forked child: asking for the process's number takes as long as many a verifier."""


def guarded(function: F) -> F:
    """Marks a function that calls a plugin's code on the path of a call, and hands what that raises to :func:`failed`.

    Nothing is wrapped: such a function costs what it did.
    """
    _guarded.add(function.__code__)
    return function


def failed(where: str, what: str, written: tuple[str, ...], error: BaseException) -> None:
    """Say of an error that a ``guarded`` function caught whose it is, and which arguments may have been written.

    To be called while the error is handled, and followed by ``raise``: an Exception keeps its type, which callers may
    be waiting for, and gets a note.

    Args:
        where: the backend or plugin whose code it is.
        what: the code, in words.
        written: the arguments that the code was to write.
        error: what it raised.

    Raises:
        PluginError: the error would end the caller's process, as SystemExit does.
    """
    frame = sys._getframe(1)
    while frame.f_code not in _guarded and frame.f_back is not None:
        frame = frame.f_back
    if frame in _frames_of_parent:
        _end_child(error)
    if isinstance(error, KeyboardInterrupt):
        return
    if not isinstance(error, Exception):
        raise PluginError(f"{where}: {what} raised {shown(error)}{may_have_written(written)}") from error
    note = f"{where} raised this in {what}{may_have_written(written)}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def may_have_written(names: tuple[str, ...]) -> str:
    """The end of a message about a failure: the arguments that a call was to write."""
    return f"; {list_names(map(repr, names))} may have been written" if names else ""


_guarded: set[CodeType] = set()
_frames_of_parent: list[FrameType] = []
"""Frames of ``guarded`` functions that were running in the parent of a forked child, which must not be left here."""


def _in_child() -> None:
    global _forks
    _forks = object()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _guarded:
            _frames_of_parent.append(frame)
        frame = frame.f_back


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_in_child)


def _end_child(error: BaseException | None) -> None:
    """End this process, a child that a plugin forked, with the status it would have had by itself."""
    status, said = 0, ""
    if isinstance(error, SystemExit):
        code = error.code
        status = code & 0xFF if isinstance(code, int) else int(code is not None)
        said = "" if code is None or isinstance(code, int) else f"{code}\n"
    elif error is not None:
        status, said = 1, traceback_of(error)
    os.write(2, said.encode(errors="replace"))
    os._exit(status)  # what is buffered is the parent's, which writes it


# --- words for it -------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """The ``repr`` of something of a plugin's for a message, whose own ``__repr__`` may fail."""
    try:
        return errors.shown(value)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"an instance of {type(value).__name__}, whose repr raises {type(error).__name__}"


def name_of(function: object) -> str:
    """A function's name for a message."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else shown(function)


def traceback_of(error: BaseException) -> str:
    """The traceback of an error, as Python prints it."""
    import traceback  # here: `import kdacore` stays light

    return "".join(traceback.format_exception(error))


# --- telling of it ------------------------------------------------------------------------------------------------

_faults: dict[tuple[str, str, str], Fault] = {}
_warned: set[tuple[str, str, str]] = set()


def report(where: str, what: str, error: BaseException) -> None:
    """Warn of an error that was caught, once for each type of error, and keep it for the doctor.

    Args:
        where: the backend or plugin whose code it is.
        what: the code, in words.
        error: what it raised.
    """
    text, kind = traceback_of(error), type(error).__name__
    _faults.setdefault((where, what, kind), Fault(where, f"{what} raised {shown(error)}\n{text}"))
    warn_once(where, what, kind, f"{what} raised:\n{text}")


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
