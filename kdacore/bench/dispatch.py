"""The ``dispatch`` preset: from the public call to the backend's function, on a cache hit.

A backend that does nothing but note the time is registered by hand and forced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kdacore import api
from kdacore.bench.clock import summary
from kdacore.bench.results import Figure, Results, Row
from kdacore.calls.values import to_kind
from kdacore.hookspecs import hookimpl
from kdacore.machine import version_of
from kdacore.ops import FEATURES
from kdacore.registry import REGISTRY
from kdacore.types import ArrayKind, Backend, InputGrads, OpImpl, Outputs

LIMITS = {"numpy": 5e-6, "torch": 10e-6}
"""Seconds."""
CALLS = 4000
NAME = "null-benchmark"


class NullPlugin:
    """One backend that serves everything with nothing and remembers when it was entered."""

    def __init__(self) -> None:
        self.entered = 0
        self._results: dict[int, Outputs] = {}
        """Results by the request's identity: they have memory of their own, and allocating it takes time."""

    def _forward(self, request: Any, inputs: Any) -> Outputs:
        self.entered = time.perf_counter_ns()
        found = self._results.get(id(request))
        if found is None:
            found = self._results[id(request)] = Outputs(1 * inputs.v)
        return found

    @staticmethod
    def _backward(request: Any, inputs: Any, saved: Any, grads: Any) -> InputGrads:
        return InputGrads(*[1 * x for x in inputs[:5]])

    @hookimpl
    def kdacore_backends(self) -> list[Backend]:
        op = OpImpl(self._forward, self._backward, serves=FEATURES, verified_archs=frozenset({"*"}))
        return [
            Backend(
                name=NAME,
                version="0",
                kinds=("numpy", "torch"),
                ops={"chunk_kda": op, "fused_recurrent_kda": op},
                auto_kinds=(),
            )
        ]


def run_preset(calls: int = CALLS) -> Results:
    """NumPy, and torch when it is installed."""
    plugin = NullPlugin()
    REGISTRY.register(plugin, NAME)
    results = Results()
    try:
        for op in ("chunk_kda", "fused_recurrent_kda"):
            results.add(_measure(plugin, op, "numpy", calls))
            if version_of("torch"):
                results.add(_measure(plugin, op, "torch", calls))
                results.add(_measure(plugin, op, "torch", calls, grad=True))
            else:
                results.rows.append(
                    Row(
                        preset="dispatch",
                        case=f"{op} torch",
                        phase="host",
                        contender="kdacore",
                        status="skipped",
                        note="torch is not installed",
                    )
                )
    finally:
        REGISTRY.unregister(NAME)
    return results


def _measure(plugin: NullPlugin, op: str, kind: ArrayKind, calls: int, grad: bool = False) -> Results:
    call = _bound(op, kind, grad)
    for _ in range(calls):  # the first call validates and selects; the others wake the processor up
        call()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        seconds.append((plugin.entered - start) * 1e-9)
    timing = summary(seconds)
    name = f"{op} {kind}" + " with gradients" * grad
    row = Row(
        preset="dispatch",
        case=name,
        phase="host",
        contender="kdacore",
        status="ok",
        backend=NAME,
        device=f"{kind} cpu",
        seconds=timing.median,
        low=timing.low,
        high=timing.high,
        samples=timing.samples,
    )
    limit = None if grad else LIMITS[kind]
    figure = Figure(
        preset="dispatch",
        name=f"dispatch, {name}",
        value=timing.median * 1e6,
        unit="us",
        want="" if limit is None else f"<= {limit * 1e6:g} us",
        met=None if limit is None else timing.median <= limit,
    )
    return Results([row], [figure])


def _bound(op: str, kind: ArrayKind, grad: bool) -> Callable[[], Any]:
    """The call with its arrays; the lambda's own cost is part of what is measured."""
    rng = np.random.default_rng(0)
    wide = [to_kind(rng.standard_normal((1, 8, 2, 16)), kind, "float32") for _ in range(4)]
    beta = to_kind(rng.random((1, 8, 2)), kind, "float32")
    if grad:
        wide = [x.requires_grad_() for x in wide]
    q, k, v, g = wide
    function = getattr(api, op)
    return lambda: function(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=False, backend=NAME
    )
