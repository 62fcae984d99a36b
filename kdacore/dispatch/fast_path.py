"""Serving a call that was made before, in as little host time as possible.

The ordinary path makes a key of what validation and selection read from a call, and looks its plan up. Making and
hashing the key takes longer than all else the front end does. The last few calls of an op are therefore kept, each with
a test that is generated as Python source; its array part is the array library's own. A call that passes the test has
that call's plan. Where the backend offers a fast path for arrays of equal strides (``OpImpl.fast_path``), the test
compares strides as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from types import CodeType
from typing import TYPE_CHECKING, Any

from kdacore import plugin_faults
from kdacore.contract import family_of
from kdacore.contract.lengths import has_families
from kdacore.dispatch.new_lengths import CallFamily
from kdacore.ops import OPS
from kdacore.types import Outputs

if TYPE_CHECKING:
    from kdacore.arrays.base import Adapter, ArrayTest, FamilyTest, Run
    from kdacore.dispatch.new_lengths import ShapesOf
    from kdacore.dispatch.plan import Plan
    from kdacore.dispatch.selection import Policy
    from kdacore.types import FastCall, Request

_PLAIN_OPTIONS = (type(None), bool, int, float)
_MAX_CALLS = 4
"""Calls kept for each op: a model has few shapes at a time, and every one is tested in turn."""


_MAX_FAMILIES = 8
"""Families kept for each op."""

_MAX_FAST_CALLS = 2
"""Backend fast paths kept for one plan, each for arrays of certain strides; other strides share the plan alone."""

Matcher = Callable[[tuple[Any, ...], tuple[Any, ...]], bool]
"""Arrays and options of an op, in the order of its definition, to: are they those of the call it was made for?"""


class SeenCall:
    """One call: how its backend was chosen, the test of its arguments, the plan that serves it, and the backend's own
    fast path, if any."""

    __slots__ = ("asked", "fast_call", "matches", "plan", "run")

    def __init__(
        self, plan: Plan, run: Run, fast_call: FastCall | None, matches: Matcher, asked: Any
    ) -> None:
        self.matches = matches
        self.asked = asked
        self.plan = plan
        self.run = run
        self.fast_call = fast_call


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


def is_plain(option: Any) -> bool:
    """Can it be written out? Not-a-number and infinity cannot."""
    return type(option) in _PLAIN_OPTIONS and (type(option) is not float or math.isfinite(option))


class FastPath:
    """The last few calls of every op with arrays of one kind. A call is kept when it comes a second time.

    Args:
        adapter: of these arrays.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.calls: dict[str, tuple[SeenCall, ...]] = {}
        """Calls that are kept, by op, in the order in which they are tested."""
        self.families: dict[str, tuple[CallFamily, ...]] = {}
        """Calls whose lengths change, by op."""
        self._once: dict[str, tuple[Plan, ...]] = {}
        """Plans whose call has come once."""
        self._new: dict[str, tuple[Hashable, ...]] = {}
        """Families of which one plan was made the ordinary way."""

    def clear(self) -> None:
        """Forget every call (the backends or the configuration changed)."""
        self.calls.clear()
        self.families.clear()
        self._once.clear()
        self._new.clear()

    def plan_of(
        self, op: str, arrays: tuple[Any, ...], options: tuple[Any, ...], asked: Any
    ) -> tuple[Plan, Run] | None:
        """The plan of a call that differs from others in lengths alone, and what runs it.

        Raises:
            UnsupportedError: no backend, or not the forced one, can serve a call of these lengths.
        """
        for calls in self.families.get(op, ()):
            if asked == calls.asked:
                shapes = calls.shapes_of(arrays, options)
                if shapes is not None:
                    plan = calls.plan_of(shapes)
                    return None if plan is None else (plan, calls.run)
        return None

    def note_new(
        self, op: str, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan, policy: Policy
    ) -> None:
        """Take note of a plan that was made the ordinary way. Of the second one of a family on, calls are recognised
        that differ from it in lengths alone."""
        if not has_families(plan.request) or plan.differentiated is not None:
            return
        key = asked, family_of(plan.request)
        known = self._new.get(op, ())
        if key not in known:
            self._new[op] = (key, *known[: _MAX_FAMILIES - 1])
            return
        family_test = self._adapter.family_test
        found = family_test and shapes_of(inputs, options, family_test)
        if found:
            calls = CallFamily(plan, policy, asked, found, self._adapter.runner(plan, inputs))
            self.families[op] = (calls, *self.families.get(op, ())[: _MAX_FAMILIES - 1])

    def note(self, op: str, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan) -> None:
        """Take note of a call that ``plan`` served the ordinary way."""
        once = self._once.get(op, ())
        if not any(plan is p for p in once):
            self._once[op] = (plan, *once[: _MAX_CALLS - 1])
            return
        kept = self.calls.get(op, ())[: _MAX_CALLS - 1]
        fast_call = None
        if plan.fast_path is not None and sum(plan is seen.plan for seen in kept) < _MAX_FAST_CALLS:
            fast_call = plan.fast_path(plan.request, inputs)
        array_test = self._adapter.array_test
        matches = array_test and matcher(inputs, options, array_test, fast_call is not None)
        if matches is None:
            return
        seen = SeenCall(plan, self._adapter.runner(plan, inputs), fast_call, matches, asked)
        if isinstance(fast_call, _FirstCall):
            fast_call.seen = seen
        # A test that accepts any strides must come after those with a fast path for particular strides.
        behind = 1 + max((i for i, other in enumerate(kept) if other.plan is plan), default=-1)
        place = behind if fast_call is None else 0
        self.calls[op] = (*kept[:place], seen, *kept[place:])


def offered(
    plan: Plan, make: Callable[[Request, Any], FastCall | None], request: Request, inputs: Any
) -> FastCall | None:
    """What ``make``, a backend's ``fast_path``, offers for calls like this one, held to the plan's rules.

    Without it a call goes its ordinary way, so what is wrong with the offer is reported and ends no call.
    """
    where, what = f"backend {plan.backend.name}", f"fast path of {request.op}"
    found, error = plugin_faults.attempt(make, request, inputs)
    if error is not None:
        plugin_faults.report(where, what, error)
        return None
    if found is not None and not callable(found):
        plugin_faults.complain(where, what, "answer", f"is {plugin_faults.shown(found)}, no function or None")
        return None
    if found is None or request.needs_grad:  # of those with gradients the adapter sees to the results
        checked: FastCall | None = found
        return checked
    return _FirstCall(plan, found)


class _FirstCall:
    """A fast path whose results are held to the request until they fit once; then it takes this one's place in the call
    that was seen."""

    def __init__(self, plan: Plan, fast_call: FastCall) -> None:
        self._plan, self._fast_call = plan, fast_call
        self.seen: SeenCall | None = None

    def __call__(self, arrays: tuple[Any, ...]) -> Any:
        results = self._fast_call(arrays)
        if results is None:
            return None
        self._plan.check_fast_results(arrays, results)
        outputs = OPS[self._plan.request.op].outputs
        whole = outputs is Outputs
        if self.seen is not None:
            usual = self._fast_call
            self.seen.fast_call = usual if whole else _as_forward_returns(outputs, usual)
        return results if whole else _public(outputs, results)


def _as_forward_returns(outputs: Any, fast_call: FastCall) -> FastCall:
    """For the ops whose callers see what ``forward`` returns, not its parts."""

    def call(arrays: tuple[Any, ...]) -> Any:
        results = fast_call(arrays)
        return None if results is None else _public(outputs, results)

    return call


def _public(outputs: Any, results: tuple[Any, ...]) -> Any:
    return results[0] if outputs is None else outputs(*results)
