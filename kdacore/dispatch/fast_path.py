"""Serving a call that was made before, in as little host time as possible.

The ordinary path makes a key of what validation and selection read from a call, and looks its plan up. Making and
hashing the key takes longer than all else the front end does. The last few calls of an op are therefore kept, each with
a test that is generated as Python source; its array part is the array library's own. A call that passes the test has
that call's plan. Where the backend offers a fast path for arrays of equal strides (``OpImpl.fast_path``), the test
compares strides as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdacore import plugin_faults
from kdacore.ops import OPS
from kdacore.types import Outputs

if TYPE_CHECKING:
    from kdacore.arrays.base import Adapter, ArrayTest, Run
    from kdacore.dispatch.plan import Plan
    from kdacore.types import FastCall, Request

_PLAIN_OPTIONS = (type(None), bool, int, float)
_MAX_CALLS = 4
"""Calls kept for each op: a model has few shapes at a time, and every one is tested in turn."""


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
    arrays = {name: x for name, x in zip(inputs._fields, inputs, strict=True) if x is not None}
    found = array_test(arrays, same_strides)
    if found is None or not all(is_plain(x) for x in options):
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
        self._once: dict[str, tuple[Plan, ...]] = {}
        """Plans whose call has come once."""

    def clear(self) -> None:
        """Forget every call (the backends or the configuration changed)."""
        self.calls.clear()
        self._once.clear()

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
