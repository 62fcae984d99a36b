"""Tests that find calls like one that was made, generated as Python source: a loop would take as long as planning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

from kdacore.dispatch.plan import is_plain

ArrayTest = Callable[[dict[str, Any], bool], "tuple[str, dict[str, Any]] | None"]
"""Arrays by argument name, and whether strides count, to a Python expression in those names and the values it uses. The
expression is true of arrays that validation and selection cannot tell from these: same type, dtype, device, shape, and
strides if they count (those of arrays that a call may write always count). None for arrays that must take the ordinary
path."""

FamilyTest = Callable[[dict[str, Any]], "tuple[str, dict[str, Any]] | None"]
"""As :data:`ArrayTest`, of arrays that validation and selection can tell from these by their sizes alone: the numbers
of their axes are the same, strides may be any."""

Matcher = Callable[[tuple[Any, ...], tuple[Any, ...]], bool]
"""Arrays and options of an op, in the order of its definition, to: are they those of the call it was made for?"""

Shapes = tuple[tuple[int, ...], ...]
"""Of the arrays that a call gives, in the order of its op's definition."""

ShapesOf = Callable[[tuple[Any, ...], tuple[Any, ...]], "Shapes | None"]
"""Arrays and options of an op, in the order of its definition, to the shapes of the arrays that are given; None where
the call differs from others of the family in more than lengths."""


def matcher(
    inputs: Any, options: tuple[Any, ...], array_test: ArrayTest, same_strides: bool
) -> Matcher | None:
    """A function of an op's arrays and options: are they like these? Written out, since a loop would take as long."""
    arrays = _given(inputs)
    found = array_test(arrays, same_strides)
    return None if found is None else _written_out(inputs, options, *found, "{}")


def shapes_of(inputs: Any, options: tuple[Any, ...], family_test: FamilyTest) -> ShapesOf | None:
    """A function of an op's arrays and options: the shapes of the arrays, where the call differs from this one in
    lengths alone."""
    arrays = _given(inputs)
    found = family_test(arrays)
    shapes = "".join([f"{name}.shape, " for name in arrays])
    return None if found is None else _written_out(inputs, options, *found, f"({shapes}) if {{}} else None")


def _given(inputs: Any) -> dict[str, Any]:
    return {name: x for name, x in zip(inputs._fields, inputs, strict=True) if x is not None}


def _written_out(
    inputs: Any, options: tuple[Any, ...], expression: str, values: dict[str, Any], answer: str
) -> Any:
    """A function that tests a call's options and, by ``expression``, its arrays. None where the options cannot be
    written out.

    Args:
        inputs: of the call that others are to be like.
        options: its options.
        expression: true of arrays like its.
        values: that the expression uses.
        answer: what the function returns, an expression with ``{}`` for the whole test.
    """
    if not all(is_plain(x) for x in options):
        return None
    names = [f"option_{i}" for i in range(len(options))]
    tests = [_is(name, x) for name, x in zip(names, options, strict=True)]
    tests += [f"{name} is None" for name, x in zip(inputs._fields, inputs, strict=True) if x is None]
    source = [
        "def matches(arrays, options):",
        "    try:",
        f"        {', '.join(inputs._fields)}, = arrays",
        f"        {', '.join(names)}, = options" if names else "",
        f"        return {answer.format(' and '.join((*tests, expression)))}",
        # Something else than an array, which validation names; an op of this name that has other arguments.
        "    except (AttributeError, ValueError): return None",
    ]
    exec(_compiled("\n".join(source)), values)
    return values["matches"]


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    """Calls that differ in values alone, shapes for example, have the same source, and compiling it takes long."""
    return compile(source, "<recognises a call>", "exec")


def _is(name: str, value: Any) -> str:
    """The test for one option. Of types too, and first: True == 1 == 1.0, but not as arguments."""
    if value is None or isinstance(value, bool):
        return f"{name} is {value}"
    return f"type({name}) is {type(value).__name__} and {name} == {value!r}"
