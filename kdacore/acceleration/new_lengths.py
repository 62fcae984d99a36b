"""Serving calls whose lengths are new, or were seen among the last thousands.

A server has other tokens, sequences and pools at every step. A call that differs from one that was validated in nothing
else is recognised by a generated test, as repeated calls are, which leaves lengths free. Its plan is found by the
shapes of its arrays. Where it has none yet, only what depends on lengths is done: shapes are compared with one another,
and backends are asked again (:class:`kdacore.dispatch.selection.Family`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdacore.acceleration.checks import Bounds, LengthChecks
from kdacore.acceleration.requests import RequestsLike
from kdacore.dispatch import plan as plans
from kdacore.dispatch import selection
from kdacore.dispatch.plan import Plan
from kdacore.dispatch.results import check_results
from kdacore.ops import OPS
from kdacore.types import Request, Selection, lengths_of

if TYPE_CHECKING:
    from kdacore.acceleration.matchers import Shapes, ShapesOf
    from kdacore.arrays.base import Run

_MAX_PLANS = 4096
"""Plans kept of one family."""


class CallFamily:
    """Calls of an op that differ in lengths alone.

    Args:
        plan: of one of them.
        policy: under which its backend was chosen.
        asked: how its backend was chosen.
        shapes_of: recognises the others.
        run: runs their plans.
        library: the module of their arrays, ``numpy_arrays`` or ``torch_arrays``.
    """

    __slots__ = ("_plan", "_plans", "_request_of", "_run", "_selections", "asked", "checks", "shapes_of")

    def __init__(
        self, plan: Plan, policy: selection.Policy, asked: Any, shapes_of: ShapesOf, run: Run, library: Any
    ) -> None:
        self.asked = asked
        self.shapes_of = shapes_of
        self.checks = LengthChecks(plan, library)
        self._run = run
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
            plan = _of_other_lengths(self._plan, request, chosen)
            if len(self._plans) >= _MAX_PLANS:
                self._plans = {}
            self._plans[shapes] = plan
        return plan

    def execute(self, plan: Plan, inputs: Any, memory: Bounds | None) -> Any:
        """As :func:`kdacore.dispatch.plan.execute`. ``memory``: where the arrays lie, where that is known."""
        if plan.results_checked or plan.check is not None:
            return plans.execute(plan, inputs, self._run)
        plan.record()
        outputs = self._run(plan, inputs)
        if not self.checks.results_fit(plan, inputs, outputs, memory):
            check_results(plan, inputs, outputs)
            self.checks.learn(plan, outputs)
        plan.results_checked = True
        return outputs


def _of_other_lengths(like: Plan, request: Request, chosen: Selection) -> Plan:
    """The plan of a call that differs from another plan's in lengths alone."""
    if chosen.backend != like.backend.name:
        return Plan(OPS[request.op], request, chosen, like.adapter)
    plan: Plan = Plan.__new__(Plan)
    plan.request = request
    plan.selection = chosen
    plan.inputs = like.inputs
    plan.adapter = like.adapter
    plan.backend = like.backend
    plan.impl = like.impl
    plan.forward = like.forward
    plan.run = like.run
    plan.validate = like.validate
    plan.check = like.check
    plan.writes = like.writes
    plan.joined = None
    plan.differentiated = None
    plan.results_checked = plan.gradients_checked = False
    return plan
