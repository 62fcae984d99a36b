"""Cache of compiled programs, one per function and request; the least recently used is dropped.

A program for the CPU holds several hundred memory maps and a Linux process may have 65530, so a
caller whose lengths keep changing would crash the compiler if every program were kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax

from kdacore.types import Request

MAX_PROGRAMS = 48
"""Programs kept for eager calls. A caller's own ``jit`` has its own cache."""


@lru_cache(maxsize=MAX_PROGRAMS)
def compiled_program(fn: Callable[..., Any], request: Request) -> Callable[..., Any]:
    """``fn(request, ...)`` under jit."""
    program: Callable[..., Any] = jax.jit(partial(fn, request))
    return program
