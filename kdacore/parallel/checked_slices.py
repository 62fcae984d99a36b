"""A backend's own functions of a slice, held to the rules of ``forward`` and ``backward``.

Types are checked at every call; shapes, dtypes, devices and memory the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdacore import plugin_faults
from kdacore.arrays import adapter_of
from kdacore.dispatch import results
from kdacore.dispatch.cost import is_cost
from kdacore.errors import PluginError
from kdacore.types import InputGrads, Outputs, Request, SliceForward, SliceFunctions


def problem_of(offered: Any) -> str:
    """What is wrong with what ``OpImpl.slices`` answered; empty when nothing is."""
    if not isinstance(offered, SliceFunctions):
        return f"is {plugin_faults.shown(offered)}, no kdacore.types.SliceFunctions or None"
    for name in SliceFunctions._fields[:4]:
        if not callable(getattr(offered, name)):
            return f"has {name} = {plugin_faults.shown(getattr(offered, name))}, no function"
    if not is_cost(offered.seconds):
        shown = plugin_faults.shown(offered.seconds)
        return f"has seconds = {shown}, no finite number of 0 or more, nor None"
    if offered.form is not None and not callable(offered.form):
        return f"has form = {plugin_faults.shown(offered.form)}, no function or None"
    return ""


def checked(backend: str, request: Request, own: SliceFunctions) -> SliceFunctions:
    """Functions that raise PluginError, naming the backend and the result, where a result is no such thing."""
    rows = 1 if request.packed else request.B
    state = (rows, request.HV, request.K, request.V)
    maps = {"M": (rows, request.HV, request.K, request.K), "C": state}
    seen: set[str] = set()

    def begin(*given: Any) -> SliceForward:
        found: SliceForward = typed(backend, request, "slices.begin", own.begin, given, SliceForward)
        if "begin" not in seen:
            for name, shape in maps.items():
                check(backend, request, "slices.begin", name, getattr(found, name), shape)
            _own_memory(backend, request, "slices.begin", {"M": found.M, "C": found.C}, given[1])
            seen.add("begin")
        return found

    def finish(*given: Any) -> Outputs:  # the caller holds the rest to the request
        outputs: Outputs = typed(backend, request, "slices.finish", own.finish, given, Outputs)
        return outputs

    def backward_begin(*given: Any) -> tuple[Any, Any]:
        found = typed(backend, request, "slices.backward_begin", own.backward_begin, given, tuple)
        if len(found) != 2:
            got = f"a tuple of {len(found)}"
            raise _error(
                backend,
                request,
                "slices.backward_begin",
                f"returned {got}; wanted an array and something pending",
            )
        if "backward_begin" not in seen:
            check(backend, request, "slices.backward_begin", "the gradient", found[0], state)
            seen.add("backward_begin")
        return found[0], found[1]

    def backward_finish(*given: Any) -> InputGrads:  # as finish
        grads: InputGrads = typed(
            backend, request, "slices.backward_finish", own.backward_finish, given, InputGrads
        )
        return grads

    return SliceFunctions(begin, finish, backward_begin, backward_finish, own.seconds, own.form)


@plugin_faults.guarded
def typed(
    backend: str, request: Request, name: str, function: Callable[..., Any], given: Any, wanted: type
) -> Any:
    """What a function of a backend returns. PluginError where it is not of a type."""
    try:
        found = function(*given)
    except BaseException as error:
        results.failed(backend, name, request, error)
        raise
    if not isinstance(found, wanted):
        want = f"kdacore.types.{wanted.__name__}" if wanted is not tuple else "a tuple"
        raise _error(backend, request, name, f"returned {type(found).__name__}; wanted {want}")
    return found


def check(backend: str, request: Request, name: str, result: str, x: Any, shape: tuple[int, ...]) -> None:
    """Hold a result, in the dtype of states, to its shape. PluginError."""
    expected = results.Expected(result, shape, (request.state_dtype,))
    if problem := results.problem_of(request, x, expected):
        raise _error(backend, request, name, f"{result}: {problem}")


def _own_memory(backend: str, request: Request, name: str, found: dict[str, Any], inputs: Any) -> None:
    adapter = adapter_of(inputs.q)
    if adapter is None or adapter.immutable:
        return
    if problem := results.memory_problem(found, inputs, {}):
        raise _error(backend, request, name, problem)


def _error(backend: str, request: Request, name: str, text: str) -> PluginError:
    return PluginError(f"backend {backend!r}: {name} of {request.op}: {text}")
