"""What a backend's plugin declares without importing it: functions of its modules, and packages it needs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_function(package: str, module: str, function: str) -> Callable[..., Any]:
    """``package.module.function``, imported by its first call."""
    found: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not found:
            found.append(getattr(import_module(f"{package}.{module}"), function))
        return found[0](*args)

    call.__name__ = call.__qualname__ = function
    return call


def package_probe(package: str) -> Callable[[], str | None]:
    """A requirement's probe for a top-level package. A folder of that name on the path is none: it has no origin."""

    def probe() -> str | None:
        spec = find_spec(package)
        return f"{package} is not installed" if spec is None or spec.origin is None else None

    return probe
