"""What every integration is made of: replaced attributes that can be put back, and counts of the calls taken over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HookStatus:
    """One function of a host, as far as this process has called it."""

    function: str
    """Its name in the host."""
    place: str
    """Where the host was told of kdacore: a registry, or the attribute that was replaced."""
    served: int
    """Calls that kdacore computed."""
    declined: int
    """Calls that were left to the host."""
    reason: str
    """Why the last of those was; empty when there is none."""


class Hook:
    """One function of a host: where it is hooked, and its counts."""

    __slots__ = ("declined", "function", "place", "reason", "served")

    def __init__(self, function: str, place: str = "") -> None:
        self.function = function
        self.place = place
        self.served = self.declined = 0
        self.reason = ""

    def decline(self, reason: str) -> None:
        """Count a call that is left to the host."""
        self.declined += 1
        self.reason = reason

    def status(self) -> HookStatus:
        return HookStatus(self.function, self.place, self.served, self.declined, self.reason)


class Patches:
    """Attributes of modules or classes that were replaced, to be put back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by what ``make`` returns for it.

        Raises:
            AttributeError: the owner has no such attribute.
        """
        original = getattr(owner, attribute)
        replacement = make(original)
        setattr(owner, attribute, replacement)
        self._replaced.append((owner, attribute, original, replacement))

    def undo(self) -> None:
        """Put every attribute back. One that someone else has replaced since then is left, with a warning."""
        while self._replaced:
            owner, attribute, original, replacement = self._replaced.pop()
            if getattr(owner, attribute, None) is replacement:
                setattr(owner, attribute, original)
            else:
                name = getattr(owner, "__name__", repr(owner))
                warnings.warn(
                    f"{name}.{attribute} was replaced again by someone else and is left as it is",
                    RuntimeWarning,
                    stacklevel=3,
                )
