"""Calls on several ranks joined to autograd. Imported with the first that needs gradients, as that of plain calls."""

from __future__ import annotations

from typing import Any

import torch

from kdacore.arrays.torch.autograd import never_traced, refuse_twice
from kdacore.arrays.torch.modes import as_given, refuse_wrapped
from kdacore.arrays.torch.tensor_views import resolved
from kdacore.parallel.exchange import Residuals, Rows
from kdacore.parallel.layout import Layout
from kdacore.types import ChunkInputs

_HOST = ChunkInputs._fields.index("cu_seqlens_cpu")


class RanksFunction(torch.autograd.Function):
    """Forward and backward of one rank. Every rank must run both, in one order: both wait for the other ranks."""

    @staticmethod
    def forward(ctx: Any, call: Any, number: int, code: int, *arrays: Any) -> tuple[Any, Any, Any]:
        outputs, residuals, rows = call.forward(call.opdef.inputs(*arrays), number, code)
        ctx.call, ctx.number, ctx.count = call, number, len(arrays)
        # A host copy of the offsets may be a NumPy array, which autograd cannot save.
        ctx.host_offsets, tensors = None, arrays
        if arrays[_HOST] is not None and not isinstance(arrays[_HOST], torch.Tensor):
            ctx.host_offsets, tensors = arrays[_HOST], (*arrays[:_HOST], None, *arrays[_HOST + 1 :])
        # A copy of those that are used: the view would keep the maps of all ranks alive.
        transitions = residuals.transitions
        if transitions.shape[0] > 1:
            transitions = transitions[:-1].clone()
        else:
            transitions = transitions.new_empty((0, *transitions.shape[1:]))
        place = () if rows is None else (rows.cu_seqlens, *rows.place)
        ctx.packed = rows is not None
        ctx.save_for_backward(
            *tensors, residuals.start, transitions, residuals.marks, *place, *residuals.saved
        )
        ctx.set_materialize_grads(False)
        if outputs.checkpoints is not None:
            ctx.mark_non_differentiable(outputs.checkpoints)
        return outputs.o, outputs.final_state, outputs.checkpoints

    @staticmethod
    @never_traced
    def backward(ctx: Any, do: Any, dstate: Any, _: Any) -> Any:
        call = ctx.call
        refuse_wrapped(call.opdef.name, (do, dstate))
        do, dstate = (None if x is None else resolved(x) for x in (do, dstate))
        kept = ctx.saved_tensors  # once: every look unpacks them all, and checkpoint() allows no second
        arrays = kept[: ctx.count]
        if ctx.host_offsets is not None:
            arrays = (*arrays[:_HOST], ctx.host_offsets, *arrays[_HOST + 1 :])
        start, transitions, marks, *rest = kept[ctx.count :]
        rows, saved = None, rest
        if ctx.packed:
            fields = 1 + len(Layout._fields)
            rows, saved = Rows(rest[0], Layout(*rest[1:fields])), rest[fields:]
        inputs = call.opdef.inputs(*arrays)
        with torch.no_grad(), as_given(inputs.q):
            residuals = Residuals(start, transitions, marks, tuple(saved), ctx.number)
            grads = call.backward(inputs, residuals, do, dstate, rows)
        padded = [*grads, *([None] * (len(arrays) - len(grads)))]
        found = [g if needed else None for g, needed in zip(padded, ctx.needs_input_grad[3:], strict=True)]
        return None, None, None, *(refuse_twice(found, arrays) if torch.is_grad_enabled() else found)
