"""Keeps a process that runs many calls of JAX below the memory maps that Linux allows it."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

MAPS = Path("/proc/self/maps")
"""One line a memory map of this process; on Linux alone."""
MANY_MAPS = 20_000
SECONDS = 0.5
"""From one count of the maps to the next: a count takes some milliseconds, and what is compiled in this time has fewer
maps than are left above :data:`MANY_MAPS`."""

_counted = float("-inf")


def drop_if_many() -> None:
    """Drop JAX's compiled programs where they have taken many memory maps.

    Each program that XLA compiles for the CPU takes some hundreds, of which Linux allows a process 65,530; beyond that
    the compiler crashes.
    """
    global _counted
    if "jax" not in sys.modules or time.monotonic() - _counted < SECONDS or not MAPS.exists():
        return
    if MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()
    _counted = time.monotonic()
