"""Packages that are installed, made absent for a while."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_hidden: dict[str, dict[str, Any]] = {}


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Inside the ``with`` block, importing ``package`` fails as if it were not installed."""
    _hide(package)
    try:
        yield
    finally:
        _show(package)


@contextlib.contextmanager
def shown(package: str) -> Iterator[None]:
    """Inside the ``with`` block, a package that is hidden is there again."""
    _show(package)
    try:
        yield
    finally:
        _hide(package)


def _hide(package: str) -> None:
    loaded = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    _hidden[package] = {name: sys.modules.pop(name) for name in loaded}
    absent: Any = None  # what the import system takes for a module that cannot be found
    sys.modules[package] = absent


def _show(package: str) -> None:
    del sys.modules[package]
    sys.modules.update(_hidden.pop(package))
