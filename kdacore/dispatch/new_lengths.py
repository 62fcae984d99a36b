"""Serving calls whose lengths are new, or were seen among the last thousands.

A server has other tokens, sequences and pools at every step. A call that differs from one that was validated in nothing
else is recognised by a generated test, as repeated calls are (:mod:`kdacore.dispatch.fast_path`), which leaves lengths
free. Its plan is found by the shapes of its arrays. Where it has none yet, only what depends on lengths is done: shapes
are compared with one another, and backends are asked again (:class:`kdacore.dispatch.selection.Family`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdacore.contract import lengths_of
from kdacore.contract.lengths import RequestsLike, Shapes
from kdacore.dispatch import selection

if TYPE_CHECKING:
    from kdacore.arrays.base import Run
    from kdacore.dispatch.plan import Plan

_MAX_PLANS = 4096
"""Plans kept of one family."""

ShapesOf = Callable[[tuple[Any, ...], tuple[Any, ...]], "Shapes | None"]
"""Arrays and options of an op, in the order of its definition, to the shapes of the arrays that are given; None where
the call differs from others of the family in more than lengths."""


class CallFamily:
    """Calls of an op that differ in lengths alone.

    Args:
        plan: of one of them.
        policy: under which its backend was chosen.
        asked: how its backend was chosen.
        shapes_of: recognises the others.
        run: runs their plans.
    """

    __slots__ = ("_plan", "_plans", "_request_of", "_selections", "asked", "run", "shapes_of")

    def __init__(
        self, plan: Plan, policy: selection.Policy, asked: Any, shapes_of: ShapesOf, run: Run
    ) -> None:
        self.asked = asked
        self.shapes_of = shapes_of
        self.run = run
        self._plan = plan
        self._request_of = RequestsLike(plan.request)
        self._selections = selection.family(plan.request, policy)
        self._plans: dict[Shapes, Plan] = {tuple([spec.shape for _, spec in plan.request.tensors]): plan}

    def plan_of(self, shapes: Shapes) -> Plan | None:
        """The plan of a call with arrays of these shapes. None where they may be wrong: validation names the argument.

        Raises:
            UnsupportedError: no backend, or not the forced one, can serve a call of these lengths.
        """
        plan = self._plans.get(shapes)
        if plan is None:
            request = self._request_of(shapes)
            if request is None:
                return None
            chosen = self._selections.select(request, lengths_of(request))
            plan = self._plan.of_other_lengths(request, chosen)
            if len(self._plans) >= _MAX_PLANS:
                self._plans = {}
            self._plans[shapes] = plan
        return plan
