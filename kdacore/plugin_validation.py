"""Validate plugin declarations, once, when a plugin is loaded: a wrong one must break no call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from typing import Any, get_args

from kdacore.errors import list_names
from kdacore.ops import OPS
from kdacore.types import ArrayKind, Backend, OpImpl, Requirement

Check = Callable[[Any], bool]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME_WANTED = (
    "at most 64 letters, digits, '.', '_' and '-', a letter or digit first: it becomes part of file names"
)


def objection(backend: Backend) -> str:
    """The first field of the wrong type, in words; empty when there is none."""
    if not isinstance(backend.name, str) or not _NAME.fullmatch(backend.name):
        return f"declares a backend whose name is {_shown(backend.name)}; wanted {_NAME_WANTED}"
    found = _first(backend, _BACKEND)
    if not found and (unknown := [op for op in backend.ops if op not in OPS]):
        found = f"declares unknown ops: {list_names(map(str, unknown))}"
    if not found and (foreign := [kind for kind in backend.kinds if kind not in get_args(ArrayKind)]):
        found = f"declares unknown kinds: {list_names(foreign)}; there are {list_names(get_args(ArrayKind))}"
    for op, impl in () if found else backend.ops.items():
        found = found or _first(impl, _OP, f"ops[{op!r}]", "an OpImpl", OpImpl)
    for i, requirement in enumerate(() if found else backend.requirements):
        found = found or _first(requirement, _REQUIREMENT, f"requirements[{i}]", "a Requirement", Requirement)
    return found and f"backend {backend.name!r} {found}"


def _first(
    value: Any, fields: Mapping[str, tuple[Check, str]], path: str = "", wanted: str = "", kind: type = object
) -> str:
    """The first wrong field of ``value``, or that it is not of its kind."""
    if not isinstance(value, kind):
        return f"has {path} = {_shown(value)}; wanted {wanted}"
    for name, (check, want) in fields.items():
        if not check(getattr(value, name)):
            return (
                f"has {'.'.join(filter(None, (path, name)))} = {_shown(getattr(value, name))}; wanted {want}"
            )
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _str(value: Any) -> bool:
    return isinstance(value, str)


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _names(value: Any) -> bool:
    """A str is a collection of str too, and never what was meant."""
    return _several(value) and all(isinstance(name, str) for name in value)


def _several(value: Any) -> bool:
    return isinstance(value, tuple | list | Set)


def _functions(value: Any) -> bool:
    return _several(value) and all(map(callable, value))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_TEXT, _FLAG, _TUPLE = (_str, "a str"), (_bool, "a bool"), (_names, "a tuple of str")
_TUPLE_OR_NONE = (_or_none(_names), "a tuple of str, or None")
_FUNCTION_OR_NONE = (_or_none(callable), "a function, or None")
_BACKEND: dict[str, tuple[Check, str]] = {
    "version": _TEXT,
    "kinds": _TUPLE,
    "ops": (lambda ops: isinstance(ops, Mapping), "a mapping of names to OpImpl"),
    "summary": _TEXT,
    "requirements": (_several, "a tuple of Requirement"),
    "rank": (_number, "an int"),
    "device_types": _TUPLE,
    "auto_kinds": _TUPLE_OR_NONE,
    "auto_device_types": _TUPLE_OR_NONE,
    "traceable": _FLAG,
    "capturable": _FLAG,
}
_OP: dict[str, tuple[Check, str]] = {
    "forward": (callable, "a function"),
    "backward": _FUNCTION_OR_NONE,
    "serves": (lambda names: isinstance(names, Set) and _names(names), "a frozenset of str"),
    "verifiers": (_functions, "a tuple of functions"),
    "cost": _FUNCTION_OR_NONE,
    "verified_archs": (lambda archs: isinstance(archs, Set) and _names(archs), "a frozenset of str"),
    "batch_invariant": _FLAG,
    "compiles": _FLAG,
    "fast_path": _FUNCTION_OR_NONE,
    "fast_gradients": _FUNCTION_OR_NONE,
    "slices": _FUNCTION_OR_NONE,
}
_REQUIREMENT: dict[str, tuple[Check, str]] = {
    "name": _TEXT,
    "probe": (callable, "a function"),
    "remedy": _TEXT,
    "hardware": _FLAG,
}
