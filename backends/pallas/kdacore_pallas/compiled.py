"""Compiled programs, one per function and request, the least recently used dropped.

A program for the CPU holds several hundred memory maps and a Linux process may have 65530: a caller whose lengths
keep changing would end in a crash of the compiler if every program were kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax

from kdacore.types import Request

KEPT = 48
"""Programs kept alive by eager calls; a caller's own ``jit`` keeps its own."""


@lru_cache(maxsize=KEPT)
def compiled(fn: Callable[..., Any], request: Request) -> Callable[..., Any]:
    """``fn(request, ...)`` under jit."""
    program: Callable[..., Any] = jax.jit(partial(fn, request))
    return program
