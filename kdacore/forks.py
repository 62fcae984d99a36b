"""Locks in forked children: the thread that held one in the parent is not there to release it."""

from __future__ import annotations

import os
from collections.abc import Callable


def renew_in_child(renew: Callable[[], None]) -> None:
    """Call ``renew``, which replaces a lock by a new one, in every child that is forked from now on."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=renew)
