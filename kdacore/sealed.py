"""Data classes that nothing can change, ``object.__setattr__`` included: what one plugin is handed, others see too.

A frozen dataclass refuses ``x.field = value`` only. Here the fields are those of a tuple, which has no memory that
Python code could write.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def sealed(cls: type[T]) -> type[T]:
    """Decorates a frozen dataclass (without ``slots``, whose fields have no default factories).

    The class keeps its fields, defaults, methods and name. ``dataclasses.replace``, ``fields`` and ``asdict``, copying
    and pickling work as before, and instances of different classes are never equal.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    defaults = [field.default for field in fields if field.default is not dataclasses.MISSING]
    storage: Any = collections.namedtuple(cls.__name__, names, defaults=defaults, module=cls.__module__)  # type: ignore[misc]
    members = {name: value for name, value in vars(cls).items() if name not in (*_REPLACED, *names)}
    members |= {"__slots__": (), "__eq__": _equals, "__ne__": _differs, "__hash__": tuple.__hash__, "__doc__": cls.__doc__}
    bases = tuple(base for base in cls.__bases__ if base is not object)
    made: type[T] = type(cls.__name__, (storage, *bases), members)
    return made


_REPLACED = (
    "__dict__",
    "__weakref__",
    "__init__",
    "__repr__",
    "__eq__",
    "__hash__",
    "__setattr__",
    "__delattr__",
)
"""Members of a dataclass that hold or write its fields, or that a tuple has in a form of its own."""


def _equals(self: Any, other: object) -> bool:
    return type(self) is type(other) and _tuple_equals(self, other)


def _differs(self: Any, other: object) -> bool:
    return not _equals(self, other)


_tuple_equals: Any = tuple.__eq__
