"""The ``xla`` preset: plain JAX on the CPU against the reference backend, forward and ``grad``, and their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from kdacore import api
from kdacore.bench import arrays as made
from kdacore.bench import cpu, gate
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, HostClock, Step, Timing, interleave
from kdacore.bench.results import Figure, Results, Row

CASE = cpu.CASE
FASTER, BACKWARD, GROWTH = 1.0, 4.0, 2.2
"""Reference over XLA forward, both called eagerly; ``grad`` over forward, both in ``jit``; memory of ``grad`` at twice
the length."""
REFERENCE, EAGER = "reference, NumPy", "xla forward"
FORWARD, GRAD = "xla forward in jit", "xla grad in jit"
"""A caller's own ``jit`` is one program; an eager call may use threads (kdacore_pallas.xla.chunk_forward_threads)."""


def run_preset(case: Case = CASE, budget: Budget | None = None) -> Results:
    """Time the reference forward, the XLA forward and its ``grad``; compiled programs tell their memory."""
    import jax

    given = made.options(case)
    host = made.make(case, "init", "cpu")
    rng = np.random.default_rng(made.SEED)
    do = rng.standard_normal(host["v"].shape, dtype=np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = {name: jax.numpy.asarray(x) for name, x in host.items()}
        forward = jax.jit(lambda x: api.chunk_kda(**x, **given, backend="xla"))
        weights = jax.numpy.asarray(do)
        grad = _gradient(given)
        steps: dict[str, Step] = {
            REFERENCE: lambda: api.chunk_kda(**host, **given, backend="reference"),
            EAGER: lambda: api.chunk_kda(**arrays, **given, backend="xla"),
            FORWARD: lambda: forward(arrays),
            GRAD: lambda: grad(arrays, weights),
        }
        want = gate.expected(case, host, do)
        outputs = dataclasses.replace(want, gradients={})
        o, state = forward(arrays)
        verdicts = {
            REFERENCE: gate.judge(case, outputs, *steps[REFERENCE]()),
            EAGER: gate.judge(case, outputs, *steps[EAGER]()),
            FORWARD: gate.judge(case, outputs, o, state),
            GRAD: gate.judge(case, want, o, state, grad(arrays, weights)),
        }
        right = {name: step for name, step in steps.items() if verdicts[name].ok}
        clock = HostClock(jax.block_until_ready)
        timings = interleave(right, clock, budget or Budget(samples=15, seconds=60))
        peaks = {FORWARD: _memory(forward, arrays), GRAD: _memory(grad, arrays, weights)}
        growth = _growth(case, given, peaks[GRAD])
    rows = [_row(case, name, verdicts[name], timings.get(name), peaks.get(name), host) for name in steps]
    return Results(rows, _figures(timings, growth, judged=case == CASE))


def _gradient(options: dict[str, Any]) -> Callable[[Any, Any], Any]:
    """The compiled gradient of ``sum(o * do)`` in every array, a function of these and of ``do``."""
    import jax

    def loss(x: dict[str, Any], do: Any) -> Any:
        return (api.chunk_kda(**x, **options, backend="xla")[0] * do).sum()

    found: Callable[[Any, Any], Any] = jax.jit(jax.grad(loss))
    return found


def _memory(program: Any, *arrays: Any) -> int:
    """Bytes a compiled program takes beyond its inputs: its outputs and everything in between."""
    planned = program.lower(*arrays).compile().memory_analysis()
    return int(planned.temp_size_in_bytes + planned.output_size_in_bytes)


def _growth(case: Case, options: dict[str, Any], single: int) -> float:
    """Memory of ``grad`` at twice the case's length over that at the length itself; nothing runs."""
    import jax

    longer = dataclasses.replace(case, T=2 * case.T)
    shapes = jax.eval_shape(
        lambda: {n: jax.numpy.asarray(x) for n, x in made.make(longer, "init", "cpu").items()}
    )
    return _memory(_gradient(options), shapes, shapes["v"]) / single


def _row(
    case: Case, name: str, verdict: gate.Verdict, timing: Timing | None, peak: int | None, host: made.Arrays
) -> Row:
    return cpu.measured_row(
        "xla",
        case,
        name,
        verdict,
        timing,
        phase="training" if name == GRAD else "forward",
        backend="reference" if name == REFERENCE else "xla",
        device="numpy cpu" if name == REFERENCE else "jax cpu",
        peak_bytes=peak,
        input_bytes=made.nbytes(host),
    )


def _figures(timings: dict[str, Timing], growth: float, judged: bool) -> list[Figure]:
    """The promised ratios; they are promised of the full-size case only."""
    found = []

    def figure(name: str, value: float, want: str, met: bool | None) -> None:
        limit = (want, met) if judged else ("", None)
        found.append(Figure(preset="xla", name=name, value=value, unit="x", want=limit[0], met=limit[1]))

    if {REFERENCE, EAGER, FORWARD} <= timings.keys():
        eager, traced = (timings[REFERENCE].median / timings[name].median for name in (EAGER, FORWARD))
        figure("XLA forward over the NumPy reference", eager, f">= {FASTER:g} x", eager >= FASTER)
        figure("XLA forward in jit over the NumPy reference", traced, "", None)
    if {FORWARD, GRAD} <= timings.keys():
        ratio = timings[GRAD].median / timings[FORWARD].median
        figure(
            "grad (forward and backward) over forward, in jit", ratio, f"<= {BACKWARD:g} x", ratio <= BACKWARD
        )
    figure("memory of grad at twice the length", growth, f"<= {GROWTH:g} x, that is linear", growth <= GROWTH)
    return found
