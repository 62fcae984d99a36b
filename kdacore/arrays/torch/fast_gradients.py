"""Recognised torch calls that need gradients: a backend's ``fast_gradients`` joined to autograd with as little Python
as a ``torch.autograd.Function`` allows.

The gradients are those of the ordinary path, which everything out of the ordinary is handed to: ``create_graph``,
batched gradients, subclasses, saved tensors that a hook gave another layout, what the backend declines.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from kdacore import plugin_faults
from kdacore.arrays.base import Plan
from kdacore.arrays.torch import fast_path
from kdacore.arrays.torch.autograd import backward_of
from kdacore.arrays.torch.modes import is_readable, is_wrapped, refuse_wrapped
from kdacore.errors import PluginError
from kdacore.types import FastCall, FastGradients, InputGrads, Request

_COUNT = len(InputGrads._fields)
"""Gradients of a whole op: those of its first inputs, in their order."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Tensor, _grad_enabled = torch.Tensor, torch.is_grad_enabled
_is_tracing = torch.compiler.is_dynamo_compiling


def fast_gradients(plan: Plan, request: Request, inputs: Any) -> FastCall | None:
    """See :attr:`kdacore.arrays.base.Adapter.fast_gradients`."""
    if fast_path.TensorGuards is None:
        return None
    # Recognised calls have the dispatch keys of these. Wrapped tensors are left over from a transform that has ended.
    if any(x is not None and (type(x) not in _PLAIN or is_wrapped(x)) for x in inputs):
        return None
    wanted = tuple([x is not None and x.requires_grad for x in inputs[:_COUNT]])
    make = plan.impl.fast_gradients
    found = None if make is None else make(request, inputs, wanted)
    if found is None:
        return None
    if not (isinstance(found, tuple) and len(found) == 2 and all(map(callable, found))):
        raise PluginError(f"returned {type(found).__name__}; wanted kdacore.types.FastGradients or None")
    return _Joined(plan, FastGradients(*found), inputs, wanted).call


class _Joined:
    """A recognised call joined to autograd. Keeps layouts, no arrays."""

    def __init__(self, plan: Plan, found: FastGradients, inputs: Any, wanted: tuple[bool, ...]) -> None:
        self.plan, self.wanted = plan, wanted
        self.forward: Callable[..., Any] = self._checked_first(found.forward)
        self.backward = found.backward
        given = [i for i, x in enumerate(inputs) if x is not None]
        self.count = len(given)
        self.given = itemgetter(*given)
        """Selects, from the op's arrays, those that a call has."""
        self.spread = itemgetter(*[given.index(i) if i in given else -1 for i in range(len(inputs))])
        """Makes the op's arrays again from these and a None."""
        self.results = itemgetter(-1, -1, *[i if i < _COUNT else -1 for i in given])
        """Makes, from gradients and a None, what autograd is given: None for this object and for the tuple of arrays,
        and one for each given array."""
        self.layouts: list[Any] | None = None
        """Layouts of what is saved for backward. None before the first call."""
        self.same_layouts: Callable[..., bool] = lambda *kept: False
        """Torch's own check of them, which also compares the state of the thread (autocast)."""
        self.checked = False
        """The gradients have been held to the request, once."""
        apply, given_of = _apply, self.given

        def call(arrays: tuple[Any, ...]) -> Any:
            return apply(self, arrays, *given_of(arrays))

        self.call = call

    def _checked_first(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, whose results are held to the request until they fit once; then it takes this one's place."""

        def first(arrays: tuple[Any, ...]) -> Any:
            results = forward(arrays)
            if results is not None:
                self.plan.check_fast_results(arrays, results, saves=True)
                self.forward = forward
            return results

        return first

    def may_differ(self, kept: tuple[Any, ...]) -> bool:
        """Whether saved tensors may be laid out otherwise than when they were saved, as a hook may return them."""
        if self.layouts is None or any(type(x) not in _PLAIN or not is_readable(x) for x in kept):
            return True
        if [_layout(x) for x in kept] != self.layouts:
            return True
        guards = fast_path.TensorGuards(*kept, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.same_layouts = guards.check
        return False


def _layout(x: Any) -> tuple[Any, ...]:
    return x.shape, x.stride() if x.layout is torch.strided else None, x.dtype, x.device


class FastFunction(torch.autograd.Function):
    """:class:`kdacore.arrays.torch.autograd.WholeFunction` for a recognised call. Its forward returns None where the
    backend declines."""

    @staticmethod
    def forward(ctx: Any, joined: _Joined, arrays: tuple[Any, ...], *given: Any) -> Any:
        results = joined.forward(arrays)
        if results is None:
            return None
        ctx.joined = joined
        kept = given + results[3:]  # the latter: nothing, unless the backend saves something
        if joined.layouts is None:
            joined.layouts = [_layout(x) for x in kept]
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        if results[2] is not None:
            ctx.mark_non_differentiable(results[2])
        return results[:3]

    @staticmethod
    @plugin_faults.guarded
    def backward(ctx: Any, do: Any, dstate: Any, _: Any) -> Any:
        if _is_tracing():
            return _untraced(ctx, do, dstate)
        joined: _Joined = ctx.joined
        kept = ctx.saved_tensors  # once: every look unpacks them all, and checkpoint() allows no second
        count = joined.count
        arrays = joined.spread((*kept[:count], None))
        if (
            not _grad_enabled()
            and (do is None or (type(do) is _Tensor and is_readable(do)))
            and (dstate is None or (type(dstate) is _Tensor and is_readable(dstate)))
            and (joined.same_layouts(*kept) or not joined.may_differ(kept))
        ):
            try:
                grads = joined.backward(arrays, kept[count:], do, dstate)
            except BaseException as error:
                joined.plan.failed("fast backward", error)
                raise
            if grads is not None:
                if not joined.checked:
                    plan, whole = joined.plan, isinstance(grads, tuple) and len(grads) == _COUNT
                    plan.check_gradients(
                        plan.inputs(*arrays), InputGrads(*grads) if whole else grads, joined.wanted
                    )
                    joined.checked = True
                return joined.results((*grads, None))
        refuse_wrapped(joined.plan.request.op, (do, dstate))
        needed = (*joined.wanted, *([False] * (len(arrays) - _COUNT)))
        found = backward_of(joined.plan, arrays, kept[count:], do, dstate, needed)
        return None, None, *joined.given(found)


@torch.compiler.disable
def _untraced(ctx: Any, do: Any, dstate: Any) -> Any:
    """See :func:`kdacore.arrays.torch.autograd.never_traced`, which takes one more call of Python."""
    return FastFunction.backward(ctx, do, dstate, None)


_apply: Callable[..., Any] = super(torch.autograd.Function, FastFunction).apply
"""``FastFunction.apply`` without looking for transforms of ``torch.func``, in which no call is recognised."""
_node: Any = getattr(FastFunction, "_backward_cls", None)
if _node is not None:  # the engine calls this; torch's own first asks which function it is to call
    _node.apply = FastFunction.backward
