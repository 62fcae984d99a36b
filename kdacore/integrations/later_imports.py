"""Doing something to a module as soon as it has been imported, and now where it has been already.

Engines load their plugins before they import their models, whose modules are heavy and may not be importable yet.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def when_imported(module: str, action: Action) -> None:
    """Call ``action`` with a module, once, when it has been executed."""
    imported = sys.modules.get(module)
    if imported is not None and not getattr(imported.__spec__, "_initializing", False):
        action(imported)
        return
    _FINDER.waiting.setdefault(module, []).append(action)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def forget(action: Action) -> None:
    """Do not call ``action`` for modules that have not been imported yet."""
    for waiting in _FINDER.waiting.values():
        waiting[:] = [other for other in waiting if other is not action]


class _Finder(MetaPathFinder):
    """Finds the modules that are waited for as the other finders do, and adds what is to be done afterwards."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}
        self._finding: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self.waiting.get(fullname) or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, self.waiting[fullname])
        return spec


class _ThenAct(Loader):
    """A loader that hands the module it has executed to the actions that wait for it."""

    def __init__(self, loader: Any, actions: list[Action]) -> None:
        self._loader, self._actions = loader, actions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # the module's own sources and resources are read through it
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        while self._actions:
            self._actions.pop(0)(module)


_FINDER = _Finder()
