"""Recognised torch calls that need gradients: their steps (:class:`kdacore.arrays.torch.autograd.Step`), with as little
Python as a ``torch.autograd.Function`` allows.

A call seen before runs a backend's ``fast_gradients``; one of new lengths its ordinary functions. The gradients are
those of the ordinary path, which everything out of the ordinary is handed to: ``create_graph``, batched gradients,
subclasses, saved tensors that a hook gave another layout, what the backend declines.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from kdacore.acceleration import torch_arrays
from kdacore.acceleration.backend_fast_paths import check_fast_results
from kdacore.acceleration.checks import Bounds
from kdacore.arrays.base import Run
from kdacore.arrays.torch.autograd import CallFunction, gradients_of
from kdacore.arrays.torch.autograd import wanted as wanted_of
from kdacore.arrays.torch.modes import autocasts, is_readable, is_wrapped, refuse_wrapped
from kdacore.dispatch.plan import Plan
from kdacore.dispatch.results import check_gradients
from kdacore.errors import PluginError
from kdacore.types import FastCall, FastGradients, InputGrads, OutputGrads, Outputs, Request

_COUNT = len(InputGrads._fields)
"""Gradients of a whole op: those of its first inputs, in their order."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Tensor, _grad_enabled = torch.Tensor, torch.is_grad_enabled
_new_tuple: Any = tuple.__new__


class _Arrays:
    """How the arrays of recognised calls are handed to autograd and back: the same for calls that give the same."""

    def __init__(self, inputs: Any) -> None:
        self.wanted = tuple([x is not None and x.requires_grad for x in inputs[:_COUNT]])
        given = [i for i, x in enumerate(inputs) if x is not None]
        self.count = len(given)
        self.given = itemgetter(*given)
        """Selects, from the op's arrays, those that a call has."""
        self.spread = itemgetter(*[given.index(i) if i in given else -1 for i in range(len(inputs))])
        """Makes the op's arrays again from these and a None."""
        self.returned: Callable[[Any], tuple[Any, ...]] = itemgetter(
            -1, -1, *[i if i < _COUNT and self.wanted[i] else -1 for i in given]
        )
        """Makes, from gradients and a None, what autograd is given: None for the step and for the tuple of arrays, and
        one for each given array."""

    def ordinary(
        self, plan: Plan, arrays: Any, saved: tuple[Any, ...], grads: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The gradients as a call that was not recognised gets them."""
        refuse_wrapped(plan.request.op, grads)
        needed = (*self.wanted, *([False] * (len(arrays) - _COUNT)))
        found = wanted_of(gradients_of(plan, arrays, saved, grads), arrays, needed)
        return None, None, *self.given(found)


def _are_ordinary(grads: tuple[Any, ...]) -> bool:
    """Whether gradients that reach a backward are plain tensors, and its own need not be differentiable."""
    do, dstate, _ = grads
    return (
        not _grad_enabled()
        and (do is None or (type(do) is _Tensor and is_readable(do)))
        and (dstate is None or (type(dstate) is _Tensor and is_readable(dstate)))
    )


def _are_plain(kept: tuple[Any, ...]) -> bool:
    """Whether saved tensors are in memory as they seem; a hook may return others."""
    return all(type(x) in _PLAIN and is_readable(x) for x in kept)


# --- calls seen before -----------------------------------------------------------------------------------------------


def fast_gradients(plan: Plan, request: Request, inputs: Any) -> FastCall | None:
    """See :data:`kdacore.acceleration.backend_fast_paths.FastGradientsOf`."""
    if torch_arrays.TensorGuards is None:
        return None
    # Recognised calls have the dispatch keys of these. Wrapped tensors are left over from a transform that has ended.
    if any(x is not None and (type(x) not in _PLAIN or is_wrapped(x)) for x in inputs):
        return None
    arrays = _Arrays(inputs)
    make = plan.impl.fast_gradients
    found = None if make is None else make(request, inputs, arrays.wanted)
    if found is None:
        return None
    if not (isinstance(found, tuple) and len(found) == 2 and all(map(callable, found))):
        raise PluginError(f"returned {type(found).__name__}; wanted kdacore.types.FastGradients or None")
    step, given_of, apply = _FastStep(plan, FastGradients(*found), arrays), arrays.given, _apply

    def call(given: tuple[Any, ...]) -> Any:
        return apply(step, given, *given_of(given))

    return call


class _FastStep:
    """The step of calls like one seen before. Keeps layouts, no arrays."""

    visible = 3

    def __init__(self, plan: Plan, found: FastGradients, arrays: _Arrays) -> None:
        self._plan, self._arrays = plan, arrays
        self.forward: Callable[[Any], Any] = self._checked_first(found.forward)
        self._backward = found.backward
        self._layouts: list[Any] = []
        """Layouts of what is saved for backward."""
        self._same_layouts: Callable[..., bool] = lambda *kept: False
        """Torch's own check of them, which also compares the state of the thread (autocast)."""
        self._checked = False
        """The gradients have been held to the request, once."""

    def _checked_first(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, whose results are held to the request until they fit once; then it takes this one's place."""

        def first(arrays: tuple[Any, ...]) -> Any:
            results = forward(arrays)
            if results is not None:
                check_fast_results(self._plan, arrays, results, saves=True)
                self._layouts = [_layout(x) for x in self._arrays.given(arrays) + results[3:]]
                self.forward = forward
            return results

        return first

    def backward(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """See :class:`kdacore.arrays.torch.autograd.Step`."""
        of, plan = self._arrays, self._plan
        kept = ctx.saved_tensors  # once: every look unpacks them all, and checkpoint() allows no second
        count = of.count
        arrays = of.spread((*kept[:count], None))
        if _are_ordinary(grads) and (self._same_layouts(*kept) or not self._may_differ(kept)):
            try:
                found = self._backward(arrays, kept[count:], grads[0], grads[1])
            except BaseException as error:
                plan.failed("fast backward", error)
                raise
            if found is not None:
                if not self._checked:
                    whole = isinstance(found, tuple) and len(found) == _COUNT
                    named = InputGrads(*found) if whole else found
                    check_gradients(plan, plan.inputs(*arrays), named, of.wanted)
                    self._checked = True
                return of.returned((*found, None))
        return of.ordinary(plan, arrays, kept[count:], grads)

    def _may_differ(self, kept: tuple[Any, ...]) -> bool:
        """Whether saved tensors may be laid out otherwise than when they were saved, as a hook may return them."""
        if not _are_plain(kept) or [_layout(x) for x in kept] != self._layouts:
            return True
        guards = torch_arrays.TensorGuards(*kept, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._same_layouts = guards.check
        return False


def _layout(x: Any) -> tuple[Any, ...]:
    return x.shape, x.stride() if x.layout is torch.strided else None, x.dtype, x.device


# --- calls of new lengths --------------------------------------------------------------------------------------------


def family_runner(plan: Plan, inputs: Any, ordinary: Run) -> Run:
    """What runs calls that differ from this one in lengths, joined to autograd. ``ordinary``: what runs this one."""
    if plan.request.op == "kda_gate" or autocasts(inputs[0]):
        return ordinary
    family = _Family(inputs)
    given_of, apply = family.arrays.given, _apply

    def run(plan: Plan, inputs: Any) -> Outputs:
        return Outputs(*apply(_LengthStep(plan, family), inputs, *given_of(inputs)))

    return run


class _Family:
    """What the steps of calls that differ in lengths share: tests of tensors, made of those of the first."""

    def __init__(self, inputs: Any) -> None:
        self.arrays = _Arrays(inputs)
        self.kept_are_plain: Callable[..., bool] = lambda *kept: False
        """Torch's own check of saved tensors but for their sizes."""
        self._are_alike: Callable[..., bool] = lambda *grads: False
        """The same of the gradients that the backend returns."""
        self._count = -1
        self._backend = ""

    def may_differ(self, kept: tuple[Any, ...]) -> bool:
        """Whether saved tensors may be other than plain ones, or autocast is on, in this thread."""
        if not _are_plain(kept) or autocasts(kept[0]):
            return True
        self.kept_are_plain = _but_for_sizes(kept)
        return False

    def check(self, plan: Plan, inputs: Any, grads: Any) -> None:
        """Hold gradients of new lengths to the request. PluginError."""
        if not self._fit(plan, inputs, grads):
            check_gradients(plan, inputs, grads)
            self._backend = plan.backend.name
            found = [g for g in grads if g is not None]
            self._count = len(found)
            plain = all(type(g) is _Tensor and g.layout is torch.strided for g in found)
            self._are_alike = _but_for_sizes(found) if plain else lambda *grads: False
        plan.gradients_checked = True

    def _fit(self, plan: Plan, inputs: Any, grads: Any) -> bool:
        """Whether gradients are like those that were checked, each of its array's shape and with memory of its own.
        False also where that is not known."""
        if type(grads) is not InputGrads or plan.backend.name != self._backend:
            return False
        found = [g for g in grads if g is not None]
        if len(found) != self._count or not self._are_alike(*found):
            return False
        for x, g in zip(inputs, grads, strict=False):
            if x is None or g is None:
                if x is not g:
                    return False
            elif x.shape != g.shape:
                return False
        own = torch_arrays.bounds(found)
        return all(contiguous for _, _, contiguous in own) and _apart(own, torch_arrays.bounds(inputs))


def _but_for_sizes(tensors: Any) -> Callable[..., bool]:
    """Torch's test for tensors that differ from these in sizes and strides alone; False where torch has none."""
    if torch_arrays.TensorGuards is None or len(set(map(id, tensors))) != len(tensors):
        return lambda *others: False
    free: Any = [[None] * x.dim() for x in tensors]
    guards = torch_arrays.TensorGuards(*tensors, dynamic_dims_sizes=free, dynamic_dims_strides=free)
    count, check = len(tensors), guards.check
    return lambda *others: len(others) == count and check(*others)


def _apart(own: Bounds, others: Bounds) -> bool:
    """Whether none of our bytes is also another one's, of ours or of the others."""
    ends = 0  # of all before
    ends_of_own = 0
    for first, end, is_own in sorted(
        [*[(a, b, True) for a, b, _ in own], *[(a, b, False) for a, b, _ in others]]
    ):
        if first < (ends if is_own else ends_of_own):
            return False
        ends = max(ends, end)
        if is_own:
            ends_of_own = end
    return True


class _LengthStep:
    """The step of a call of new lengths."""

    __slots__ = ("_family", "_plan")
    visible = 3

    def __init__(self, plan: Plan, family: _Family) -> None:
        self._plan, self._family = plan, family

    def forward(self, arrays: Any) -> tuple[Any, ...]:
        """See :class:`kdacore.arrays.torch.autograd.Step`."""
        outputs = self._plan.forward(self._plan.request, arrays)
        return (*outputs[:3], *outputs.saved)

    def backward(self, ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """See :class:`kdacore.arrays.torch.autograd.Step`."""
        plan, family = self._plan, self._family
        of = family.arrays
        kept = ctx.saved_tensors  # once: every look unpacks them all, and checkpoint() allows no second
        count = of.count
        arrays = of.spread((*kept[:count], None))
        if not _are_ordinary(grads) or not (family.kept_are_plain(*kept) or not family.may_differ(kept)):
            return of.ordinary(plan, arrays, kept[count:], grads)
        inputs = _new_tuple(plan.inputs, arrays)
        found = plan.gradients(inputs, kept[count:], _new_tuple(OutputGrads, grads[:2]))
        if not plan.gradients_checked:
            family.check(plan, inputs, found)
        return of.returned((*found, None))


_apply: Callable[..., Any] = super(torch.autograd.Function, CallFunction).apply
"""``CallFunction.apply`` without looking for transforms of ``torch.func``, in which no call is recognised."""
_node: Any = getattr(CallFunction, "_backward_cls", None)
if _node is not None:  # the engine calls this; torch's own first asks which function it is to call
    _node.apply = CallFunction.backward
