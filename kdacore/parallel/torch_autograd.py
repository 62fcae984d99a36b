"""Calls on several ranks joined to autograd. Imported with the first that needs gradients, as that of plain calls."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.arrays.torch.autograd import ArraysStep
from kdacore.arrays.torch.modes import as_given
from kdacore.arrays.torch.tensor_views import resolved
from kdacore.parallel.exchange import Residuals, Rows
from kdacore.parallel.layout import Layout


class RanksStep(ArraysStep):
    """Forward and backward of one rank. Every rank must run both, in one order: both wait for the other ranks."""

    def __init__(self, call: Any, number: int, code: int, inputs: Any) -> None:
        super().__init__(call.opdef.name, inputs)
        self._call, self._number, self._code = call, number, code
        self._packed = False

    def forward(self, arrays: Any) -> tuple[Any, ...]:
        """See :class:`kdacore.arrays.torch.autograd.Step`."""
        outputs, residuals, rows = self._call.forward(arrays, self._number, self._code)
        # A copy of those that are used: the view would keep the maps of all ranks alive.
        transitions = residuals.transitions
        if transitions.shape[0] > 1:
            transitions = transitions[:-1].clone()
        else:
            transitions = transitions.new_empty((0, *transitions.shape[1:]))
        place = () if rows is None else (rows.cu_seqlens, *rows.place)
        self._packed = rows is not None
        return (*outputs[:3], residuals.start, transitions, residuals.marks, *place, *residuals.saved)

    def gradients(self, arrays: list[Any], saved: tuple[Any, ...], grads: tuple[Any, ...]) -> Any:
        """See :class:`kdacore.arrays.torch.autograd.ArraysStep`."""
        do, dstate = (None if x is None else resolved(x) for x in grads[:2])
        start, transitions, marks, *rest = saved
        rows = None
        if self._packed:
            fields = 1 + len(Layout._fields)
            rows, rest = Rows(rest[0], Layout(*rest[1:fields])), rest[fields:]
        inputs = self._call.opdef.inputs(*arrays)
        with torch.no_grad(), as_given(inputs.q):
            residuals = Residuals(start, transitions, marks, tuple(rest), self._number)
            return self._call.backward(inputs, residuals, do, dstate, rows)
