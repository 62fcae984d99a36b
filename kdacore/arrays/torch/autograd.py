"""Eager torch calls joined to autograd: the backend's backward, called by hand.

Imported with the first call that needs gradients: ``torch.compiler.disable`` imports torch's compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kdacore.arrays.torch.modes import as_given, refuse_wrapped
from kdacore.arrays.torch.tensor_views import resolved
from kdacore.errors import UnsupportedError
from kdacore.types import OutputGrads

if TYPE_CHECKING:
    from kdacore.arrays.base import Plan


def never_traced(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled autograd would trace through what a backend does, which takes half a minute where it can be done."""
    eager = torch.compiler.disable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return (eager if torch.compiler.is_dynamo_compiling() else backward)(ctx, *grads)

    return call


class WholeFunction(torch.autograd.Function):
    """Joins forward and backward of the four whole ops. The backend was fixed by the forward's plan."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *arrays: Any) -> tuple[Any, Any, Any]:
        outputs = plan.forward(plan.request, plan.inputs(*arrays))
        ctx.plan, ctx.count = plan, len(arrays)
        # A host copy of the offsets may be a NumPy array, which autograd cannot save.
        ctx.others = {i: x for i, x in enumerate(arrays) if x is not None and not isinstance(x, torch.Tensor)}
        tensors = [x if isinstance(x, torch.Tensor) else None for x in arrays]
        ctx.save_for_backward(*tensors, *outputs.saved)
        ctx.set_materialize_grads(False)
        if outputs.checkpoints is not None:
            ctx.mark_non_differentiable(outputs.checkpoints)
        return outputs.o, outputs.final_state, outputs.checkpoints

    @staticmethod
    @never_traced
    def backward(ctx: Any, do: Any, dstate: Any, _: Any) -> Any:
        refuse_wrapped(ctx.plan.request.op, (do, dstate))
        kept = ctx.saved_tensors  # once: every look unpacks them all, and checkpoint() allows no second
        arrays = [ctx.others.get(i, x) for i, x in enumerate(kept[: ctx.count])]
        return None, *backward_of(ctx.plan, arrays, kept[ctx.count :], do, dstate, ctx.needs_input_grad[1:])


def backward_of(
    plan: Plan, arrays: Any, saved: tuple[Any, ...], do: Any, dstate: Any, needed: tuple[bool, ...]
) -> list[Any]:
    """The backend's backward of a whole op: one gradient for each array, None where none is ``needed``."""
    with torch.no_grad(), as_given(arrays[0]):
        given = OutputGrads(_resolved(do), _resolved(dstate))
        held = plan.inputs(*[_resolved(x) for x in arrays])  # a hook may have returned what it liked
        grads = plan.backward(held, tuple([_resolved(x) for x in saved]), given)
    return _returned(grads, arrays, needed)


def _resolved(x: Any) -> Any:
    return resolved(x) if isinstance(x, torch.Tensor) else x


class GateFunction(torch.autograd.Function):
    """Joins forward and backward of ``kda_gate``."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *arrays: Any) -> Any:
        ctx.plan = plan
        ctx.save_for_backward(*arrays)
        return plan.forward(plan.request, plan.inputs(*arrays))

    @staticmethod
    @never_traced
    def backward(ctx: Any, dlog: Any) -> Any:
        refuse_wrapped(ctx.plan.request.op, (dlog,))
        arrays, plan = ctx.saved_tensors, ctx.plan
        with torch.no_grad(), as_given(arrays[0]):
            grads = plan.backward(plan.inputs(*[_resolved(x) for x in arrays]), resolved(dlog))
        return None, *_returned(grads, arrays, ctx.needs_input_grad[1:])


def _returned(grads: Any, arrays: Any, needed: tuple[bool, ...]) -> list[Any]:
    """One gradient for each array input, None where none was asked for."""
    padded = [*grads, *([None] * (len(arrays) - len(grads)))]
    found = [g if is_needed else None for g, is_needed in zip(padded, needed, strict=True)]
    return refuse_twice(found, arrays) if torch.is_grad_enabled() else found  # enabled: create_graph=True


def refuse_twice(grads: list[Any], arrays: Any) -> list[Any]:
    """Let the gradients through, but make a backward through them an error that says why."""
    present = [g for g in grads if g is not None]
    sources = [x for x in arrays if isinstance(x, torch.Tensor) and x.requires_grad]
    wrapped = iter(NoDoubleBackward.apply(len(present), *present, *sources))
    return [None if g is None else next(wrapped) for g in grads]


class NoDoubleBackward(torch.autograd.Function):
    """Identity on the first ``count`` tensors whose own backward raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> Any:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise double_backward_error()


def double_backward_error() -> UnsupportedError:
    """What a second differentiation raises."""
    return UnsupportedError(
        "kdacore", "double backward: the gradients of these ops are not differentiable", {}
    )
