"""What backends offer for calls that come again: ``OpImpl.fast_path`` and ``fast_gradients``, with their checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kdacore import plugin_faults
from kdacore.arrays import adapter_of
from kdacore.dispatch.plan import Plan
from kdacore.dispatch.results import check_results, error_of, wrong
from kdacore.ops import OPS
from kdacore.types import FastCall, Outputs, Request

FastGradientsOf = Callable[[Plan, Request, Any], "FastCall | None"]
"""``fast_gradients(plan, request, inputs)``: the backend's, joined to the array library's differentiation."""


def offered(plan: Plan, inputs: Any, fast_gradients: FastGradientsOf | None) -> FastCall | None:
    """What the backend offers for calls like this one.

    Without it a call goes its ordinary way, so what is wrong with the offer is reported and ends no call.

    Args:
        plan: of the call.
        inputs: its arrays.
        fast_gradients: for calls with gradients.
    """
    request = plan.request
    make: Callable[..., Any] | None = plan.impl.fast_path
    if request.needs_grad:
        make = None
        if fast_gradients is not None and plan.impl.fast_gradients is not None:
            make = functools.partial(fast_gradients, plan)
    if make is None or plan.check is not None:
        return None
    where, what = f"backend {plan.backend.name}", f"fast path of {request.op}"
    found, error = plugin_faults.attempt(make, request, inputs)
    if error is not None:
        plugin_faults.report(where, what, error)
        return None
    if found is not None and not callable(found):
        plugin_faults.complain(where, what, "answer", f"is {plugin_faults.shown(found)}, no function or None")
        return None
    if (
        found is None or request.needs_grad
    ):  # of those with gradients the library's module sees to the results
        checked: FastCall | None = found
        return checked
    return FirstCall(plan, found)


class FirstCall:
    """A fast path whose results are held to the request until they fit once; then it takes this one's place in the call
    that was seen."""

    def __init__(self, plan: Plan, fast_call: FastCall) -> None:
        self._plan, self._fast_call = plan, fast_call
        self.seen: Any = None
        """The :class:`kdacore.acceleration.seen_calls.SeenCall`."""

    def __call__(self, arrays: tuple[Any, ...]) -> Any:
        results = self._fast_call(arrays)
        if results is None:
            return None
        check_fast_results(self._plan, arrays, results)
        outputs = OPS[self._plan.request.op].outputs
        whole = outputs is Outputs
        if self.seen is not None:
            usual = self._fast_call
            self.seen.fast_call = usual if whole else _as_forward_returns(outputs, usual)
        return results if whole else _public(outputs, results)


def _as_forward_returns(outputs: Any, fast_call: FastCall) -> FastCall:
    """For the ops whose callers see what ``forward`` returns, not its parts."""

    def call(arrays: tuple[Any, ...]) -> Any:
        results = fast_call(arrays)
        return None if results is None else _public(outputs, results)

    return call


def _public(outputs: Any, results: tuple[Any, ...]) -> Any:
    return results[0] if outputs is None else outputs(*results)


def check_fast_results(plan: Any, arrays: Any, results: Any, *, saves: bool = False) -> None:
    """Check what a backend's fast path returned, as :func:`check_results` does.

    Args:
        plan: of the call.
        arrays: of the call.
        results: a tuple of the results that the caller sees.
        saves: arrays that are saved for the backward may follow.

    Raises:
        PluginError: naming the backend and the result.
    """
    request: Request = plan.request
    function, wanted = "fast path", OPS[request.op].outputs
    # The last two of the whole ops' are none that the caller sees: what is saved, and new JAX arrays.
    count = 1 if wanted is None else len(wanted._fields) - 2 * (wanted is Outputs)  # type: ignore[attr-defined]
    if not isinstance(results, tuple) or (len(results) < count if saves else len(results) != count):
        got = f"a tuple of {len(results)}" if isinstance(results, tuple) else type(results).__name__
        raise error_of(
            plan.backend.name,
            f"{function} of {request.op} returned {got}; wanted a tuple of {count} results or None",
            request,
        )
    for i, x in enumerate(results[count:]):
        if x is not None and adapter_of(x) is None:
            raise wrong(plan.backend.name, function, request, x, f"an array as saved[{i}]")
    seen = results[:count]
    check_results(plan, plan.inputs(*arrays), seen[0] if wanted is None else wanted(*seen), function)
