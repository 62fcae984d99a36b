"""Recognising calls like earlier ones: the only way to :mod:`kdacore.acceleration`.

That folder makes calls faster and does nothing else. Where it is missing no call is recognised, and each is planned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdacore.registry import REGISTRY

if TYPE_CHECKING:
    from kdacore.arrays.base import Adapter
    from kdacore.dispatch.plan import Plan
    from kdacore.ops import OpDef

Matcher = Callable[[tuple[Any, ...], tuple[Any, ...]], bool]
"""Arrays and options of an op, in the order of its definition, to: are they those of the call it was made for?"""

ShapesOf = Callable[[tuple[Any, ...], tuple[Any, ...]], "tuple[tuple[int, ...], ...] | None"]
"""The same to the shapes of the arrays; None where the call differs from that one in more than lengths."""


def note(
    opdef: OpDef, adapter: Adapter, inputs: Any, options: tuple[Any, ...], asked: Any, plan: Plan
) -> None:
    """Take note of a call that was planned: calls like it are recognised from now on, if they keep coming."""
    new = not plan.results_checked
    memory = adapter.seen_calls
    if memory is None:
        memory = _memory_of(adapter)
        if memory is None:
            return
        if not new:  # a call like this one came before there was a memory
            memory.note(opdef.name, inputs, options, asked, plan)
    memory.note(opdef.name, inputs, options, asked, plan)
    if new:
        memory.note_new(opdef, inputs, options, asked, plan)


def matcher(adapter: Adapter, inputs: Any, options: tuple[Any, ...]) -> Matcher | None:
    """A test that finds calls with arrays and options like these. None where there is none."""
    memory = (adapter.seen_calls or _memory_of(adapter)) if adapter.recognisable else None
    found: Matcher | None = None if memory is None else memory.matcher(inputs, options)
    return found


def shapes_of(adapter: Adapter, inputs: Any, options: tuple[Any, ...]) -> ShapesOf | None:
    """A function that finds calls which differ from this one in lengths alone, and gives the shapes of their arrays.
    None where there is none."""
    memory = (adapter.seen_calls or _memory_of(adapter)) if adapter.recognisable else None
    found: ShapesOf | None = None if memory is None else memory.shapes_of(inputs, options)
    return found


def _memory_of(adapter: Adapter) -> Any:
    """The memory of calls with arrays of this kind, made when it is first needed. None without the folder."""
    package = _acceleration()
    if package is not None:
        memory = package.SeenCalls(adapter)
        REGISTRY.on_change(memory.clear)
        adapter.seen_calls = memory
    return adapter.seen_calls


@functools.cache
def _acceleration() -> Any:
    try:
        import kdacore.acceleration.seen_calls as found
    except ModuleNotFoundError as error:
        if error.name not in ("kdacore.acceleration", "kdacore.acceleration.seen_calls"):
            raise
        return None
    return found
