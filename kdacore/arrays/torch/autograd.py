"""Eager torch calls joined to autograd, in one place: the backend's backward, called by hand.

What is run forward and backward is a :class:`Step`: the ordinary one here, or one of recognised calls
(``kdacore/acceleration/torch_gradients.py``). Imported with the first call that needs gradients:
``torch.compiler.disable`` imports torch's compiler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kdacore import plugin_faults
from kdacore.arrays.torch.modes import as_given, refuse_wrapped
from kdacore.arrays.torch.tensor_views import resolved
from kdacore.errors import UnsupportedError
from kdacore.types import OutputGrads, Outputs

if TYPE_CHECKING:
    from kdacore.arrays.base import Plan

_is_tracing = torch.compiler.is_dynamo_compiling


class Step(Protocol):
    """What autograd runs for one call. The backend was fixed by the plan of its forward."""

    visible: int
    """Results that the caller sees: the first ones. Of three the third, the checkpoints, is not differentiable."""

    def forward(self, arrays: Any) -> tuple[Any, ...] | None:
        """The visible results, followed by the tensors that are saved beside the inputs. None: it declines the call."""
        ...

    def backward(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """None for the step, None for its arrays, and one gradient for each of the tensors among them."""
        ...


class CallFunction(torch.autograd.Function):
    """The one place where a call is joined to autograd.

    ``apply(step, arrays, *tensors)``, of the op's arrays and of the tensors among them, returns what callers see, or
    None where the step declines.
    """

    @staticmethod
    def forward(ctx: Any, step: Step, arrays: Any, *tensors: Any) -> Any:
        results = step.forward(arrays)
        if results is None:
            return None
        visible = step.visible
        ctx.step = step
        ctx.save_for_backward(*tensors, *results[visible:])
        if visible == 3:
            ctx.set_materialize_grads(False)
            if results[2] is not None:
                ctx.mark_non_differentiable(results[2])
        return results[:visible]

    @staticmethod
    @plugin_faults.guarded
    def backward(ctx: Any, *grads: Any) -> Any:
        if _is_tracing():
            return _untraced(ctx, *grads)
        return ctx.step.backward(ctx, grads)


@torch.compiler.disable
def _untraced(ctx: Any, *grads: Any) -> Any:
    """Compiled autograd would trace through what a backend does, which takes half a minute where it can be done."""
    return CallFunction.backward(ctx, *grads)


def differentiable(plan: Plan, inputs: Any) -> Any:
    """Run a plan's forward, joined to autograd. Returns what the forward does, without what it saves."""
    results = apply(OrdinaryStep(plan, inputs), inputs)
    return results[0] if plan.request.op == "kda_gate" else Outputs(*results)


def apply(step: ArraysStep, inputs: Any) -> Any:
    """Run the forward of a step, joined to autograd. Returns what callers see."""
    return CallFunction.apply(step, inputs, *[inputs[i] for i in step.places])


class ArraysStep(ABC):
    """The part of a step that keeps a call's arrays for its backward.

    Args:
        op: its name.
        inputs: the arrays. The tensors among them are saved by autograd; a host copy of the offsets may be a NumPy
            array, which it cannot save.
    """

    visible = 3

    def __init__(self, op: str, inputs: Any) -> None:
        self.op = op
        self.places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        """Those of the tensors among the op's arrays."""
        self._others = [None if isinstance(x, torch.Tensor) else x for x in inputs]

    @abstractmethod
    def gradients(self, arrays: list[Any], saved: tuple[Any, ...], grads: tuple[Any, ...]) -> Any:
        """The gradients of the op's first arrays."""

    @abstractmethod
    def forward(self, arrays: Any) -> tuple[Any, ...] | None:
        """See :class:`Step`."""

    def backward(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """See :class:`Step`."""
        refuse_wrapped(self.op, grads)
        kept = ctx.saved_tensors  # once: every look unpacks them all, and checkpoint() allows no second
        places, arrays = self.places, self._others.copy()
        needed = [False] * len(arrays)
        for i, x, is_needed in zip(
            places, kept, ctx.needs_input_grad[2:], strict=False
        ):  # the rest was saved
            arrays[i], needed[i] = x, is_needed
        found = wanted(self.gradients(arrays, kept[len(places) :], grads), arrays, needed)
        return None, None, *[found[i] for i in places]


class OrdinaryStep(ArraysStep):
    """The step of a call that was not recognised."""

    def __init__(self, plan: Plan, inputs: Any) -> None:
        super().__init__(plan.request.op, inputs)
        self._plan = plan
        if self.op == "kda_gate":
            self.visible = 1

    def forward(self, arrays: Any) -> tuple[Any, ...]:
        """See :class:`Step`."""
        outputs = self._plan.forward(self._plan.request, arrays)
        return (outputs,) if self.visible == 1 else (*outputs[:3], *outputs.saved)

    def gradients(self, arrays: list[Any], saved: tuple[Any, ...], grads: tuple[Any, ...]) -> Any:
        """See :class:`ArraysStep`."""
        return gradients_of(self._plan, arrays, saved, grads)


def gradients_of(plan: Plan, arrays: Any, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> Any:
    """The backend's backward. ``grads``: of the visible results."""
    with torch.no_grad(), as_given(arrays[0]):
        held = plan.inputs(*[_resolved(x) for x in arrays])  # a hook may have returned what it liked
        if len(grads) == 1:
            return plan.backward(held, _resolved(grads[0]))
        given = OutputGrads(_resolved(grads[0]), _resolved(grads[1]))
        return plan.backward(held, tuple([_resolved(x) for x in saved]), given)


def wanted(grads: Any, arrays: Any, needed: Sequence[bool]) -> list[Any]:
    """One gradient for each of the op's arrays, None where none is needed. To be called in the caller's grad mode."""
    padded = [*grads, *([None] * (len(arrays) - len(grads)))]
    found = [g if is_needed else None for g, is_needed in zip(padded, needed, strict=True)]
    return refuse_twice(found, arrays) if torch.is_grad_enabled() else found  # enabled: create_graph=True


def _resolved(x: Any) -> Any:
    return resolved(x) if isinstance(x, torch.Tensor) else x


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
