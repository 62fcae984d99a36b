"""For plugin modules, which must import quickly: functions and probes that import nothing until they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any


def lazy_function(package: str, module: str, function: str) -> Callable[..., Any]:
    """A function that imports ``package.module`` at its first call and then calls its ``function``.

    Args:
        package: the backend's own package, for example ``"kdacore_example"``.
        module: a module of it, for example ``"scan"``; dots are allowed.
        function: the name of a function there.

    Returns:
        A function that takes the positional arguments of that one and returns its result. It serves as
        ``forward``, ``backward``, ``fast_path``, ``cost`` and verifiers alike.

    Raises:
        ImportError, AttributeError: at the first call, when there is no such module or function.
    """
    found: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not found:
            found.append(getattr(import_module(f"{package}.{module}"), function))
            if isinstance(found[0], FunctionType):
                vars(call).update(vars(found[0]))  # what it declares of itself, as functools.wraps does
            vars(call)[_FOUND] = found[0]
        return found[0](*args)

    call.__name__ = call.__qualname__ = function
    return call


_FOUND = "found by kdacore.lazy"


def resolved(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that one made by :func:`lazy_function` calls, once it has been called; any other as it is."""
    if type(function) is not FunctionType:
        return function
    found: Callable[..., Any] = function.__dict__.get(_FOUND, function)
    return found


_IMPORTED = "imported by kdacore.lazy"


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        module = sys.modules.get(self.__name__)
        if module is None or module is not own.get(_IMPORTED):
            module = own[_IMPORTED] = import_module(
                self.__name__
            )  # which waits for one that is being imported
        return getattr(module, name)


def lazy_module(name: str) -> Any:
    """A stand-in for the module ``name``, which it imports when it is first asked for an attribute.

    Attributes are read from the module each time, so one that is replaced there is seen.

    Raises:
        ImportError: at the first attribute, when there is no such module.
    """
    return _LazyModule(name)


def package_probe(package: str) -> Callable[[], str | None]:
    """A requirement's probe for an importable top-level package. Nothing is imported.

    A folder of that name without an ``__init__.py`` does not count.
    """

    def probe() -> str | None:
        spec = find_spec(package)
        return f"{package} is not installed" if spec is None or spec.origin is None else None

    return probe


ON_AN_INDEX = False
"""Whether ``pip install kdacore`` finds it. To be set when the first version is released."""


def install_line(extra: str) -> str:
    """The command that installs kdacore with one of its extras, for messages.

    Examples:
        >>> from kdacore.lazy import install_line
        >>> install_line("cuda")
        "pip install '.[cuda]' in a checkout of kdacore"
    """
    if ON_AN_INDEX:
        return f"pip install 'kdacore[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of kdacore"
