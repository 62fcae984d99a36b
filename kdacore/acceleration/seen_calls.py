"""The last calls of every op: those like them run without being planned.

The ordinary path makes a key of what validation and selection read from a call, and looks its plan up. Making and
hashing the key takes longer than all else the front end does. The last few calls of an op are therefore kept, each with
a generated test (:mod:`kdacore.acceleration.matchers`). A call that passes the test has that call's plan. Where the
backend offers a fast path for arrays of equal strides (``OpImpl.fast_path``), the test compares strides as well. Calls
that differ from earlier ones in lengths alone are recognised too (:mod:`kdacore.acceleration.new_lengths`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from kdacore import plugin_faults
from kdacore.acceleration import matchers
from kdacore.acceleration.backend_fast_paths import FirstCall, offered
from kdacore.acceleration.new_lengths import CallFamily
from kdacore.acceleration.requests import has_families
from kdacore.dispatch.plan import RECORDS, current_policy, execute
from kdacore.types import family_of

if TYPE_CHECKING:
    from kdacore.acceleration.matchers import Matcher, ShapesOf
    from kdacore.arrays.base import Adapter, Run
    from kdacore.dispatch.plan import Plan
    from kdacore.ops import OpDef
    from kdacore.types import FastCall

_MAX_CALLS = 4
"""Calls kept for each op: a model has few shapes at a time, and every one is tested in turn."""

_MAX_FAMILIES = 8
"""Families kept for each op."""

_MAX_FAST_CALLS = 2
"""Backend fast paths kept for one plan, each for arrays of certain strides; other strides share the plan alone."""

_new_tuple: Any = tuple.__new__


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

    @plugin_faults.guarded
    def __call__(self, arrays: tuple[Any, ...]) -> Any:
        """Run a call of these arrays."""
        plan, fast_call = self.plan, self.fast_call
        if fast_call is not None:
            try:
                outputs = fast_call(arrays)
            except BaseException as error:
                plan.failed("fast path", error)
                raise
            if outputs is not None:
                for records in RECORDS.get():
                    records.append(plan.selection)
                return outputs
        return execute(plan, _new_tuple(plan.inputs, arrays), self.run)


class SeenCalls:
    """The last few calls of every op with arrays of one kind. A call is remembered when it comes a second time.

    Args:
        adapter: of these arrays.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._library = _library(adapter.kind)
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

    def recognise(
        self, op: str, arrays: tuple[Any, ...], options: tuple[Any, ...], asked: Any
    ) -> Callable[[tuple[Any, ...]], Any] | None:
        """What runs a call like an earlier one, given its arrays. None where there was none.

        Raises:
            UnsupportedError: it differs from others in lengths alone, and no backend, or not the forced one, can serve
                a call of these lengths.
        """
        for kept in self.calls.get(op, ()):
            if asked == kept.asked and kept.matches(arrays, options):
                return kept
        for family in self.families.get(op, ()):
            if asked == family.asked:
                shapes = family.shapes_of(arrays, options)
                if shapes is not None:
                    plan = family.plan_of(shapes)
                    return None if plan is None else functools.partial(self._run, family, plan, options)
        return None

    def _run(self, family: CallFamily, plan: Plan, options: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
        inputs = _new_tuple(plan.inputs, arrays)
        memory = family.checks.memory(plan, inputs) if plan.writes else None
        self.note(plan.request.op, inputs, options, family.asked, plan)
        return family.execute(plan, inputs, memory)

    def matcher(self, inputs: Any, options: tuple[Any, ...]) -> Matcher | None:
        """A test for calls with arrays, of any strides, and options like these. None where there is none."""
        return matchers.matcher(inputs, options, self._library.array_test, same_strides=False)

    def shapes_of(self, inputs: Any, options: tuple[Any, ...]) -> ShapesOf | None:
        """What recognises calls that differ from one of these in lengths alone. None where there is nothing."""
        return matchers.shapes_of(inputs, options, self._library.family_test)

    def note_new(self, opdef: OpDef, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan) -> None:
        """Take note of a plan that was made the ordinary way. Of the second one of a family on, calls are recognised
        that differ from it in lengths alone."""
        if not has_families(plan.request) or plan.differentiated is not None:
            return
        op, key = opdef.name, (asked, family_of(plan.request))
        known = self._new.get(op, ())
        if key not in known:
            self._new[op] = (key, *known[: _MAX_FAMILIES - 1])
            return
        found = self.shapes_of(inputs, options)
        if found is not None:
            run = self._adapter.runner(plan, inputs)
            if plan.request.needs_grad:
                run = _gradients().family_runner(plan, inputs, run)
            policy = current_policy(opdef, asked[0])
            calls = CallFamily(plan, policy, asked, found, run, self._library)
            self.families[op] = (calls, *self.families.get(op, ())[: _MAX_FAMILIES - 1])

    def note(self, op: str, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan) -> None:
        """Take note of a call that ``plan`` served without the call being recognised as a whole."""
        once = self._once.get(op, ())
        for known in once:
            if known is plan:
                break
        else:
            self._once[op] = (plan, *once[: _MAX_CALLS - 1])
            return
        kept = self.calls.get(op, ())[: _MAX_CALLS - 1]
        fast_call = None
        if sum(plan is seen.plan for seen in kept) < _MAX_FAST_CALLS:
            fast_call = offered(
                plan, inputs, _gradients().fast_gradients if plan.request.needs_grad else None
            )
        matches = matchers.matcher(inputs, options, self._library.array_test, fast_call is not None)
        if matches is None:
            return
        seen = SeenCall(plan, self._adapter.runner(plan, inputs), fast_call, matches, asked)
        if isinstance(fast_call, FirstCall):
            fast_call.seen = seen
        # A test that accepts any strides must come after those with a fast path for particular strides.
        behind = 1 + max((i for i, other in enumerate(kept) if other.plan is plan), default=-1)
        place = behind if fast_call is None else 0
        self.calls[op] = (*kept[:place], seen, *kept[place:])


def _library(kind: str) -> Any:
    """What differs from kind to kind of arrays: their tests and where they lie."""
    if kind == "torch":
        from kdacore.acceleration import torch_arrays

        return torch_arrays
    from kdacore.acceleration import numpy_arrays

    return numpy_arrays


def _gradients() -> Any:
    """The module for calls that need gradients, which only torch's do: it imports torch's compiler, which takes a
    second."""
    from kdacore.acceleration import torch_gradients

    return torch_gradients
