"""Every error and warning kdacore raises on purpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdacore.types import Reason


_LONGEST = 400
"""Characters of a value that a message repeats."""
_MOST_BITS = 1024
"""The most bits of an integer that is written out: Python refuses to write those of thousands of digits."""


def shown(value: Any) -> str:
    """A caller's value for a message: its ``repr``, or what can be said of it where that is too long, or raises."""
    if issubclass(type(value), int) and int.bit_length(value) > _MOST_BITS:
        return f"an integer of {int.bit_length(value)} bits"
    try:
        return shortened(str.__str__(repr(value)))  # repr may return a subclass of str
    except Exception:  # noqa: BLE001 - code of the caller's, which must not hide what is wrong with the call
        return f"an object of type {type(value).__name__} without a repr"


def shortened(text: str) -> str:
    """The beginning of a text that is too long for a message."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


class ContractError(ValueError):
    """A call breaks the contract. Raised before anything runs or is written.

    Attributes:
        op: the operation called.
        argument: the name of the argument at fault.
        got: what was passed, in words.
        want: what would have been accepted, in words.
    """

    def __init__(self, op: str, argument: str, got: object, want: str) -> None:
        words = shortened(got) if type(got) is str else shown(got)
        self.op, self.argument, self.got, self.want = op, argument, words, want
        super().__init__(contract_text(op, argument, self.got, want))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.op, self.argument, self.got, self.want)


def contract_text(op: str, argument: str, got: str, want: str) -> str:
    """The message of a :class:`ContractError`."""
    return f"{op}: argument '{argument}': got {got}; wanted {want}"


class UnsupportedError(RuntimeError):
    """A valid call that the backend it was forced on (or every backend) cannot serve.

    Attributes:
        op: the operation called.
        reasons: backend name -> every reason it gave.
    """

    def __init__(self, op: str, message: str, reasons: dict[str, tuple[Reason, ...]]) -> None:
        self.op, self.message, self.reasons = op, message, reasons
        lines = [f"{op}: {message}"]
        for name, why in reasons.items():
            lines += [f"  {name}: {reason}" for reason in why]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.op, self.message, self.reasons)


class BackendBuildError(RuntimeError):
    """A kernel failed to build. The compiler's own output is part of the message.

    Attributes:
        what: the kernel or source that failed.
        log: the compiler's output, whole.
    """

    def __init__(self, what: str, log: str) -> None:
        self.what, self.log = what, log
        super().__init__(f"building {what} failed:\n{log}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.log)


class PluginError(RuntimeError):
    """A plugin is not usable: it failed to load, clashes by name, or declares something invalid."""


class ConfigError(ValueError):
    """An environment variable holds a value kdacore does not know."""

    def __init__(self, variable: str, got: str, want: str) -> None:
        self.variable, self.got, self.want = variable, got, want
        super().__init__(f"{variable}={shortened(repr(got))}; wanted {want}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.variable, self.got, self.want)


class PerformanceWarning(UserWarning):
    """A slow backend was chosen on an accelerator; the text says what was missed and how to get it."""


class InputWarning(UserWarning):
    """``KDACORE_VALIDATE=values``: arrays that keep the contract and look like a common mistake; the text says which
    and how to mend it."""


def nearest_name(name: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """The known name that is most like ``name``, case aside; empty where none is as similar as asked, from 0 to 1."""
    import difflib  # here: `import kdacore` stays light

    by_lower = {other.lower(): other for other in known if other}
    found = difflib.get_close_matches(name.lower(), by_lower, 1, similarity)
    return by_lower[found[0]] if found else ""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, for the end of a message about an unknown name; empty where no known name is like it."""
    nearest = nearest_name(name, known) if type(name) is str else ""
    return f"; did you mean {nearest!r}?" if nearest else ""


def list_names(names: Iterable[str]) -> str:
    """``a, b, c`` for messages, or ``none``."""
    return ", ".join(names) or "none"
