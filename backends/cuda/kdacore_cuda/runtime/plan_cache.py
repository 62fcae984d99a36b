"""Caches of what an op works out from a Request alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kdacore.types import Family, Request, family_of

P = TypeVar("P")

MAX_PLANS = 4096
"""Plans of one cache."""


class FamilyCache(Generic[P]):
    """What does not depend on the lengths of a call, made once of all calls that differ in nothing else.

    Args:
        make: makes it of one of them. It may read what :func:`kdacore.types.family_of` leaves in a family and what
            calls give besides, and no figures of the device.
    """

    def __init__(self, make: Callable[[Request], P]) -> None:
        self._make = make
        self._made: dict[tuple[Family, tuple[Hashable, ...]], P] = {}

    def __call__(self, request: Request, *besides: Hashable) -> P:
        """That of a request's family, and of what it depends on besides. Raises what ``make`` raises."""
        key = family_of(request), besides
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= MAX_PLANS:
                self._made.clear()
            found = self._made[key] = self._make(request)
        return found


class PlanCache(Generic[P]):
    """Plans by Request object, and by how a call's arrays lie where that counts, each made once.

    Dispatch passes the same object for every call of one shape, so identity is the key: hashing a
    Request's thirty fields would cost more than a launch.

    Args:
        make: makes the plan of a request, or of a request and a layout, which is hashable.
    """

    def __init__(self, make: Callable[..., P]) -> None:
        self._make = make
        self._plans: dict[tuple[int, tuple[Hashable, ...]], tuple[Request, P]] = {}

    def __call__(self, request: Request, *layout: Hashable) -> P:
        """The plan of a call. Raises what ``make`` raises."""
        key = id(request), layout
        found = self._plans.get(key)
        if found is not None and found[0] is request:
            return found[1]
        plan = self._make(request, *layout)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = request, plan
        return plan
