"""Recognising a call that was made before, where the host's time counts.

The ordinary path makes a key of what validation and selection read from a call, and looks its plan up. Making and
hashing the key takes longer than all else the front end does. The last few calls of an op are therefore kept with a
test written out for each, whose array part is the array library's own; a call that passes it has that call's plan.
Where the backend offers a shorter way for arrays that lie in memory alike (``OpImpl.fast_path``), the test looks at
strides as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdacore.dispatch.call import Plan
    from kdacore.types import FastCall

ArrayTest = Callable[[dict[str, Any], bool], "tuple[str, dict[str, Any]] | None"]
"""Arrays by argument name to an expression in those names that is true of arrays a key would not tell from these (when
told so, with these strides; arrays that a call may write always with theirs), and the values the expression uses. None
when such arrays must take the ordinary path."""

_PLAIN_OPTIONS = (type(None), bool, int, float)
_ENTRIES = 4
"""Calls remembered for each op: a model has few shapes at a time, and every entry is one more to look through."""


_STEPS = 2
"""Ways for arrays of certain strides kept for one plan; the strides beyond share the plan alone."""

Matcher = Callable[[tuple[Any, ...], tuple[Any, ...]], bool]
Run = Callable[["Plan", Any], Any]


class Known:
    """One call: what it was asked with, the test of its arguments, the plan that serves it, and the shortest way."""

    __slots__ = ("asked", "grad", "matches", "plan", "run", "step")

    def __init__(
        self, plan: Plan, run: Run, step: FastCall | None, matches: Matcher, asked: Any, grad: bool
    ) -> None:
        self.matches = matches
        self.asked = asked
        self.grad = grad
        self.plan = plan
        self.run = run
        self.step = step


def _matcher(
    inputs: Any, options: tuple[Any, ...], array_test: ArrayTest, same_strides: bool
) -> Matcher | None:
    """A function of an op's arrays and options: are they like these? Written out, since a loop would take as long."""
    arrays = {name: x for name, x in zip(inputs._fields, inputs, strict=True) if x is not None}
    found = array_test(arrays, same_strides)
    if found is None or not all(_is_plain(x) for x in options):
        return None
    expression, values = found
    names = [f"option_{i}" for i in range(len(options))]
    tests = [_is(name, x) for name, x in zip(names, options, strict=True)]
    tests += [f"{name} is None" for name in inputs._fields if name not in arrays]
    source = [
        "def matches(arrays, options):",
        f"    {', '.join(inputs._fields)}, = arrays",
        f"    {', '.join(names)}, = options" if names else "",
        f"    try: return {' and '.join((*tests, expression))}",
        "    except AttributeError: return False",  # something else than an array: validation names it
    ]
    exec("\n".join(source), values)
    matches: Matcher = values["matches"]
    return matches


def _is(name: str, value: Any) -> str:
    """The test for one option. Of types too, and first: True == 1 == 1.0, but not as arguments."""
    if value is None or isinstance(value, bool):
        return f"{name} is {value}"
    return f"type({name}) is {type(value).__name__} and {name} == {value!r}"


def _is_plain(option: Any) -> bool:
    """Can it be written out? Not-a-number and infinity cannot."""
    return type(option) in _PLAIN_OPTIONS and (type(option) is not float or math.isfinite(option))


class RecentCalls:
    """The last few calls of every op. A call is remembered when it comes again soon after it was missed.

    Args:
        array_test: the array library's part of a test.
        grad_enabled: whether the library records gradients now.
        way: ``way(plan, inputs)``: what runs such calls, as :meth:`Adapter.run` would.
    """

    def __init__(
        self, array_test: ArrayTest, grad_enabled: Callable[[], bool], way: Callable[[Plan, Any], Run]
    ) -> None:
        self._array_test = array_test
        self._way = way
        self._grad_enabled = grad_enabled
        self._entries: dict[str, tuple[Known, ...]] = {}
        self._missed: dict[str, tuple[Plan, ...]] = {}

    def clear(self) -> None:
        """Forget every call (the backends or the configuration changed)."""
        self._entries.clear()
        self._missed.clear()

    def find(self, op: str, arrays: tuple[Any, ...], options: tuple[Any, ...], asked: Any) -> Known | None:
        """An earlier call like this one, None when there was none."""
        for entry in self._entries.get(op, ()):
            if asked == entry.asked and self._grad_enabled() is entry.grad and entry.matches(arrays, options):
                return entry
        return None

    def note(self, op: str, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan) -> None:
        """A call was served by ``plan`` the ordinary way. Lengths that change with every call leave no trace."""
        missed = self._missed.get(op, ())
        if not any(plan is m for m in missed):
            self._missed[op] = (plan, *missed[: _ENTRIES - 1])
            return
        kept = self._entries.get(op, ())[: _ENTRIES - 1]
        step = None
        if plan.fast_path is not None and sum(plan is e.plan for e in kept) < _STEPS:
            step = plan.fast_path(plan.request, inputs)
        matches = _matcher(inputs, options, self._array_test, step is not None)
        if matches is None:
            return
        entry = Known(plan, self._way(plan, inputs), step, matches, asked, self._grad_enabled())
        # One that takes any strides must not hide those that know a shorter way for some.
        longer = 1 + max((i for i, e in enumerate(kept) if e.plan is plan), default=-1)
        place = longer if step is None else 0
        self._entries[op] = (*kept[:place], entry, *kept[place:])
