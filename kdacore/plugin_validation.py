"""Validate plugin declarations, once, when a plugin is loaded: a wrong one must break no call.

A name that kdacore does not know is a fault too: it would never match, and its backend never be chosen, without a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, get_args

from kdacore import device
from kdacore.errors import list_names, nearest_name
from kdacore.ops import FEATURES, OPS
from kdacore.plugin_faults import shown
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
    found = _first(backend, _BACKEND) or _unknown_names(backend)
    for op, impl in () if found else backend.ops.items():
        path = f"ops[{op!r}]"
        found = found or _first(impl, _OP, path, "an OpImpl", OpImpl) or _unknown_of_op(impl, path)
    for i, requirement in enumerate(() if found else backend.requirements):
        found = found or _first(requirement, _REQUIREMENT, f"requirements[{i}]", "a Requirement", Requirement)
    return found and f"backend {backend.name!r} {found}"


# --- names --------------------------------------------------------------------------------------------------------

_KINDS = get_args(ArrayKind)
_DEVICES = (*device.TYPES, *device.TYPES_OF_EXTENSIONS)


def _unknown_names(backend: Backend) -> str:
    devices = ("*", *_DEVICES)
    return (
        _unknown("ops", "ops", backend.ops, OPS)
        or _unknown("kinds", "kinds", backend.kinds, _KINDS)
        or _unknown("auto_kinds", "kinds", backend.auto_kinds or (), _KINDS)
        or _unknown("device_types", "device types", backend.device_types, devices)
        or _unknown("auto_device_types", "device types", backend.auto_device_types or (), devices)
    )


def _unknown_of_op(impl: OpImpl, path: str) -> str:
    unusual = [arch for arch in impl.verified_archs if not device.is_architecture(arch)]
    return _unknown(f"{path}.serves", "features", impl.serves, FEATURES) or _unknown(
        f"{path}.verified_archs", "architectures", unusual, ("*", *device.ARCHITECTURES)
    )


def _unknown(field: str, what: str, names: Iterable[object], known: Iterable[str]) -> str:
    """The names in a field that are not among the known ones, with the nearest of those; empty when there are none."""
    known = tuple(known)
    unknown = sorted(str(name) for name in names if name not in known)
    if not unknown:
        return ""
    text = f"declares unknown {what}: {list_names(unknown)}"
    if what not in ("features", "architectures"):  # of which there are many
        text += f"; there are {list_names(known)}"
    nearest = list_names(f"{nearest_name(name, known, 0.0)!r} for {name!r}" for name in unknown)
    return f"{text}; the nearest known: {nearest} (in {field})"


# --- types --------------------------------------------------------------------------------------------------------


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
    text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _str(value: Any) -> bool:
    return isinstance(value, str)


def _bool(value: Any) -> bool:
    return isinstance(value, bool)


def _rank(value: Any) -> bool:
    """NaN has no order, True is nobody's rank, and an integer of thousands of digits cannot be shown."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value.bit_length() < 64 if isinstance(value, int) else math.isfinite(value)


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
    "rank": (_rank, "an int of less than 64 bits"),
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
    "form": _FUNCTION_OR_NONE,
}
_REQUIREMENT: dict[str, tuple[Check, str]] = {
    "name": _TEXT,
    "probe": (callable, "a function"),
    "remedy": _TEXT,
    "hardware": _FLAG,
}
