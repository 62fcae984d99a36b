"""The checks of a call of new lengths, where nothing about it is out of the ordinary.

They accept less than the checks of the ordinary path (:mod:`kdacore.contract.aliasing`,
:mod:`kdacore.dispatch.results`), which look at what they do not accept and say what is wrong with it, if anything.
"""

from __future__ import annotations

from typing import Any

from kdacore.contract.aliasing import check_memory, written_arguments
from kdacore.dispatch.plan import Plan
from kdacore.ops import OPS
from kdacore.types import CommitOutputs, Request

Bounds = list[tuple[int, int, bool]]
"""Of each array that a call gives, in order: no byte of it lies before the first or behind the second address. Whether
it is contiguous."""


class LengthChecks:
    """What is checked of the memory and the results of calls that differ in lengths alone.

    Args:
        plan: of one of them.
        library: the module of their arrays.
    """

    __slots__ = (
        "_backend",
        "_expected",
        "_library",
        "_outputs",
        "_single",
        "_written",
        "_written_results",
    )

    def __init__(self, plan: Plan, library: Any) -> None:
        request = plan.request
        self._library = library
        fields: tuple[str, ...] = plan.inputs._fields  # type: ignore[attr-defined]
        given = [name for name, _ in request.tensors]
        self._written = tuple(
            [(given.index(name), fields.index(name)) for name in written_arguments(request) if name in given]
        )
        """Arrays that are written: their places among those given, and among all."""
        self._outputs: Any = OPS[request.op].outputs
        self._single = self._outputs is None
        pool = request.written_pool if request.inplace_state else None
        whole = ["out" if request.has("out") else None, pool, None]
        result_in = [pool] if self._outputs is CommitOutputs else whole
        self._written_results = tuple([None if n is None else fields.index(n) for n in result_in])
        """Of each result the place of the argument that it is, where it is one."""
        self._backend = ""
        self._expected: tuple[tuple[int, int | None, Any, Any], ...] = ()
        """Of each result that is not None: its place, that of the argument that it is, or else a test of all but its
        shape, made of a result that was checked, and a function of the request that gives its shape."""

    def memory(self, plan: Plan, inputs: Any) -> Bounds | None:
        """Check what a call writes. Where its arrays lie, if that is known.

        Raises:
            ContractError: naming an array that is to be written and cannot be, or that overlaps itself or another.
        """
        found: Bounds = self._library.bounds(inputs)
        unwritable = plan.adapter.unwritable
        for i, field in self._written:
            first, end, contiguous = found[i]
            if not contiguous or unwritable(inputs[field]) is not None:
                check_memory(plan.request, inputs, plan.adapter)
                return None
            for j, (start, stop, _) in enumerate(found):
                if start < end and first < stop and i != j:
                    check_memory(plan.request, inputs, plan.adapter)
                    return None
        return found

    def learn(self, plan: Plan, outputs: Any) -> None:
        """Take results that were held to the request as examples."""
        shown = (outputs,) if self._single else outputs[:3]
        shapes = (_shape_of_gates,) if self._single else _SHAPES
        self._expected = tuple(
            [
                (i, argument, None if argument is not None else self._library.likeness(x), shape)
                for i, (x, argument, shape) in enumerate(
                    zip(shown, self._written_results, shapes, strict=False)
                )
                if x is not None
            ]
        )
        self._backend = plan.backend.name

    def results_fit(self, plan: Plan, inputs: Any, outputs: Any, memory: Bounds | None) -> bool:
        """Whether results of new lengths are as the request asks, with memory of their own. False also where that is
        not known."""
        if self._single:
            shown: tuple[Any, ...] = (outputs,)
        elif isinstance(outputs, self._outputs):
            shown = outputs[:3]
        else:
            return False
        if self._backend != plan.backend.name or sum([x is not None for x in shown]) != len(self._expected):
            return False
        taken, request = memory, plan.request
        for i, argument, is_like, shape_of in self._expected:
            x = shown[i]
            if argument is not None:
                if x is not inputs[argument]:
                    return False
                continue
            if not is_like(x) or x.shape != shape_of(request):
                return False
            first, end, contiguous = self._library.bounds_of(x)
            if not contiguous or not first:
                return False
            if taken is None:
                taken = self._library.bounds(inputs)
            for start, stop, _ in taken:
                if start < end and first < stop:
                    return False
            taken = [*taken, (first, end, True)]
        return True


def _shape_of_values(request: Request) -> tuple[int, ...]:
    return request.B, request.T, request.HV, request.V


def _shape_of_gates(request: Request) -> tuple[int, ...]:
    shape: tuple[int, ...] = request.tensors[0][1].shape
    return shape


_SHAPES = (_shape_of_values, lambda request: request.state_shape, lambda request: request.checkpoint_shape)
"""Of the results of a whole op that are none of its arguments."""
