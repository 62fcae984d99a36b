"""Functions of modules that are imported only when a call needs them: what a backend's plugin declares."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(package: str, module: str, function: str) -> Callable[..., Any]:
    """``package.module.function``, imported by its first call."""
    found: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not found:
            found.append(getattr(import_module(f"{package}.{module}"), function))
        return found[0](*args)

    call.__name__ = call.__qualname__ = function
    return call
