"""The checks of a call of new lengths, where nothing about it is out of the ordinary.

They accept less than the checks of the ordinary path (:mod:`kdacore.contract.aliasing`,
:mod:`kdacore.dispatch.results`), which look at what they do not accept and say what is wrong with it, if anything.
"""

from __future__ import annotations

from typing import Any

from kdacore.contract.aliasing import check_memory, written_arguments
from kdacore.dispatch.plan import Plan
from kdacore.types import Outputs, Request

Bounds = list[tuple[int, int, bool]]
"""Of each array that a call gives, in order: no byte of it lies before the first or behind the second address. Whether
it is contiguous."""


class LengthChecks:
    """What is checked of the memory and the results of calls that differ in lengths alone.

    Args:
        plan: of one of them.
        library: the module of their arrays.
    """

    __slots__ = ("_backend", "_library", "_models", "_single", "_written", "_written_results")

    def __init__(self, plan: Plan, library: Any) -> None:
        request = plan.request
        self._library = library
        fields: tuple[str, ...] = plan.inputs._fields  # type: ignore[attr-defined]
        given = [name for name, _ in request.tensors]
        self._written = tuple(
            [(given.index(name), fields.index(name)) for name in written_arguments(request) if name in given]
        )
        """Arrays that are written: their places among those given, and among all."""
        self._single = request.op == "kda_gate"
        result_in = [
            "out" if request.has("out") else None,
            request.written_pool if request.inplace_state else None,
            None,
        ]
        self._written_results = tuple([None if n is None else fields.index(n) for n in result_in])
        """Of each result the place of the argument that it is, where it is one."""
        self._backend = ""
        self._models: tuple[Any, ...] = ()
        """Tests of the results but for their shapes, made of results that were checked; None of those that are None."""

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
        self._models = tuple([None if x is None else self._library.likeness(x) for x in shown])
        self._backend = plan.backend.name

    def results_fit(self, plan: Plan, inputs: Any, outputs: Any, memory: Bounds | None) -> bool:
        """Whether results of new lengths are as the request asks, with memory of their own. False also where that is
        not known."""
        if self._single:
            shown: tuple[Any, ...] = (outputs,)
        elif type(outputs) is Outputs:
            shown = outputs[:3]
        else:
            return False
        if len(self._models) != len(shown) or self._backend != plan.backend.name:
            return False
        taken = memory
        for x, is_like, argument, shape in zip(
            shown, self._models, self._written_results, _shapes(plan.request), strict=False
        ):
            if x is None or is_like is None:
                if x is not is_like:
                    return False
            elif argument is not None:
                if x is not inputs[argument]:
                    return False
            else:
                if not is_like(x) or x.shape != shape:
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


def _shapes(request: Request) -> tuple[tuple[int, ...], ...]:
    """The shapes of the results that are none of the arguments."""
    if request.op == "kda_gate":
        return (request.tensors[0][1].shape,)
    values = request.tensors[2][1].shape  # q, k and v are always given
    checkpoints = request.checkpoint_shape if request.checkpoint_every else ()
    return values, request.state_shape, checkpoints
