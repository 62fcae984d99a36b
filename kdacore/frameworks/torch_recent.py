"""Recognising a torch call that was made before, for steps where the host's time counts.

Reading ten tensors' shapes, dtypes and devices from Python takes longer than all else the front end does for a
decode step. torch checks the same in one call into C++ for its compiled graphs, and that check is used here: type,
dispatch keys (so layout and device type), dtype, device index, sizes, ``requires_grad``. It is internal to torch:
where it is missing every call takes the ordinary path, which gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kdacore.dispatch import Plan

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

_grad_enabled = torch.is_grad_enabled
_PLAIN_OPTIONS = (type(None), bool, int, float)
_ENTRIES = 4
"""Calls remembered for each op: a model has few shapes at a time, and every entry is one more to look through."""


class _Entry:
    """One call: what it was asked with, the check of its tensors, and the plan that serves it."""

    __slots__ = ("asked", "grad", "matches", "plan")

    def __init__(self, plan: Plan, inputs: Any, options: tuple[Any, ...], asked: Any) -> None:
        self.matches = _matcher(inputs, options)
        self.asked = asked
        self.grad = _grad_enabled()
        self.plan = plan


def _matcher(inputs: Any, options: tuple[Any, ...]) -> Callable[..., bool]:
    """A function of an op's arrays and options: are they like these? Written out, since a loop would take as long."""
    arrays = {name: x for name, x in zip(inputs._fields, inputs, strict=True) if x is not None}
    any_stride: Any = [[None] * x.dim() for x in arrays.values()]  # a plan does not depend on strides
    guards = TensorGuards(*arrays.values(), dynamic_dims_sizes=None, dynamic_dims_strides=any_stride)
    names = [f"option_{i}" for i in range(len(options))]
    tests = [_is(name, x) for name, x in zip(names, options, strict=True)]
    tests += [f"{name} is None" for name in inputs._fields if name not in arrays]
    tests.append(f"check({', '.join(arrays)})")
    source = f"lambda {', '.join((*inputs._fields, *names))}: {' and '.join(tests)}"
    matcher: Callable[..., bool] = eval(source, {"check": guards.check})
    return matcher


def _is(name: str, value: Any) -> str:
    """The test for one option. Of types too, and first: True == 1 == 1.0, but not as arguments."""
    if value is None or isinstance(value, bool):
        return f"{name} is {value}"
    return f"type({name}) is {type(value).__name__} and {name} == {value!r}"


class RecentCalls:
    """The last few calls of every op. A call is remembered when it comes again soon after it was missed."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[_Entry, ...]] = {}
        self._missed: dict[str, tuple[Plan, ...]] = {}

    def clear(self) -> None:
        """Forget every call (the backends or the configuration changed)."""
        self._entries.clear()
        self._missed.clear()

    def find(self, op: str, inputs: Any, options: tuple[Any, ...], asked: Any) -> Plan | None:
        """The plan of an earlier call like this one, None when there was none."""
        for entry in self._entries.get(op, ()):
            if asked == entry.asked and _grad_enabled() is entry.grad and entry.matches(*inputs, *options):
                return entry.plan
        return None

    def note(self, op: str, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan) -> None:
        """A call was served by ``plan`` the ordinary way. Lengths that change with every call leave no trace."""
        missed = self._missed.get(op, ())
        if not any(plan is m for m in missed):
            self._missed[op] = (plan, *missed[: _ENTRIES - 1])
            return
        plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in inputs if x is not None)
        if TensorGuards is None or not plain or not all(_is_plain(x) for x in options):
            return
        kept = self._entries.get(op, ())[: _ENTRIES - 1]
        self._entries[op] = (_Entry(plan, inputs, options, asked), *kept)


def _is_plain(option: Any) -> bool:
    """Can it be written out? Not-a-number and infinity cannot."""
    return type(option) in _PLAIN_OPTIONS and (type(option) is not float or math.isfinite(option))
