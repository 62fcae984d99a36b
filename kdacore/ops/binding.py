"""Binding the arguments of a public call without making it: into arrays, options and ``backend``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdacore.ops.definition import OpDef, arrays_of
from kdacore.ops.foreign_keywords import unknown_arguments

Binder = Callable[..., "tuple[tuple[Any, ...], tuple[Any, ...], object]"]
"""Takes the arguments of an op's public function. Returns its arrays and its options, each in the order of the op's
definition, and ``backend``. A missing or unknown argument is a TypeError, as it is of the public function."""


_made: dict[int, tuple[OpDef, Binder]] = {}


def binder(opdef: OpDef) -> Binder:
    """The binder of an op, generated from its definition: ``inspect.Signature.bind`` takes a hundred times as long."""
    found = _made.get(id(opdef))  # to hash a definition takes longer than all the rest
    if found is None:
        found = _made[id(opdef)] = opdef, _make(opdef)
    return found[1]


def _make(opdef: OpDef) -> Binder:
    required = dict.fromkeys([a.part_of or a.name for a in opdef.array_arguments if a.required])
    others = dict.fromkeys([a.part_of or a.name for a in opdef.array_arguments if not a.required])
    optional = [f"{name}=None" for name in others]
    optional += [f"{option.name}={option.default!r}" for option in opdef.option_arguments]
    source = [
        f"def {opdef.name}({', '.join(required)}, *extra, {', '.join(optional)}, backend=None, **unknown):",
        f"    if extra or unknown: raise unknown_arguments({opdef.name!r}, extra, unknown)",
        *[
            f"    {', '.join(parts)} = arrays_of({opdef.name!r}, {name!r}, {name}, {len(parts)})"
            for name, parts in opdef.tuples.items()
        ],
        f"    return ({', '.join(opdef.arrays)},), ({''.join(f'{n}, ' for n in opdef.options)}), backend",
    ]
    made: dict[str, Binder] = {}
    exec("\n".join(source), {"unknown_arguments": unknown_arguments, "arrays_of": arrays_of}, made)
    return made[opdef.name]
