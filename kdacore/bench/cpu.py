"""The ``cpu`` preset: the reference backend against the step-by-step recurrence, in one run, on NumPy arrays."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from kdacore.bench import arrays as made
from kdacore.bench import gate
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, HostClock, Step, Timing, interleave
from kdacore.bench.results import Figure, Results, Row
from kdacore.bench.runner import shape
from kdacore.registry import REGISTRY
from kdacore.types import ChunkInputs, OutputGrads, RecurrentInputs

CASE = Case(name="B1 T4096 H8", T=4096, H=8, dtype="float32", kind="numpy", gate_sets=("init",))
SPEEDUP, BACKWARD, MEMORY = 30.0, 4.0, 6.0
"""Times faster than the recurrence; forward and backward over the forward; peak memory over the inputs."""


def run_preset(case: Case = CASE, budget: Budget | None = None) -> Results:
    """Time the oracle, the float32 recurrence, the chunked forward, and forward with backward."""
    from kdacore.oracle.recurrence import oracle_forward

    arrays = made.make(case, "init", "cpu")
    ops = REGISTRY.get("reference").backend.ops
    chunk, recurrent = ops["chunk_kda"], ops["fused_recurrent_kda"]
    request = made.request("chunk_kda", case, arrays)
    training = dataclasses.replace(request, needs_grad=True)
    inputs = ChunkInputs(**arrays)
    steps_request, steps_inputs = made.request("fused_recurrent_kda", case, arrays), RecurrentInputs(**arrays)
    rng = np.random.default_rng(made.SEED)
    do = rng.standard_normal(arrays["v"].shape, dtype=np.float32)

    def train() -> Any:
        out = chunk.forward(training, inputs)
        if chunk.backward is None:
            raise RuntimeError("the reference backend has no backward")
        return out, chunk.backward(training, inputs, out.saved, OutputGrads(do, None))

    steps: dict[str, Step] = {
        "chunked forward": lambda: chunk.forward(request, inputs),
        "chunked forward and backward": train,
        "recurrence, float32": lambda: recurrent.forward(steps_request, steps_inputs),
        "recurrence, float64 (the oracle)": lambda: oracle_forward(request, inputs),
    }
    want = gate.expected(case, arrays, do)
    out, grads = train()
    step_out = steps["recurrence, float32"]()
    verdicts = {
        "chunked forward": gate.judge(case, dataclasses.replace(want, gradients={}), out.o, out.final_state),
        "chunked forward and backward": gate.judge(case, want, out.o, out.final_state, grads._asdict()),
        "recurrence, float32": gate.judge(
            case, dataclasses.replace(want, gradients={}), step_out.o, step_out.final_state
        ),
    }
    del out, grads, step_out
    input_bytes = made.nbytes(arrays)
    peaks = {name: _peak(steps[name]) for name in ("chunked forward", "chunked forward and backward")}
    right = {n: s for n, s in steps.items() if n not in verdicts or verdicts[n].ok}
    timings = interleave(right, HostClock(), budget or Budget(samples=9, seconds=60))
    rows = []
    for name in steps:
        oracle = "oracle" in name
        row = measured_row(
            "cpu",
            case,
            name,
            verdicts.get(name),
            timings.get(name),
            phase="training" if "backward" in name else "forward",
            backend="oracle" if oracle else "reference",
            device="numpy cpu",
            peak_bytes=peaks.get(name),
            input_bytes=input_bytes,
        )
        rows.append(dataclasses.replace(row, dtype="float64") if oracle else row)
    return Results(rows, _figures({r.contender: r for r in rows}, judged=case == CASE))


def measured_row(
    preset: str, case: Case, contender: str, verdict: gate.Verdict | None, timing: Timing | None, **more: Any
) -> Row:
    """A contender's row with what was timed and judged; ``more``: the fields these do not tell.

    Without a timing the result was wrong; without a verdict it is what others are judged by.
    """
    return Row(
        preset=preset,
        case=case.name,
        contender=contender,
        status="ok" if timing else "wrong",
        gates="init",
        shape=shape(case),
        dtype=case.dtype,
        seconds=timing.median if timing else None,
        low=timing.low if timing else None,
        high=timing.high if timing else None,
        samples=timing.samples if timing else 0,
        error=verdict.error if verdict else None,
        bound=verdict.bound if verdict else None,
        **more,
    )


def _figures(rows: dict[str, Row], judged: bool) -> list[Figure]:
    """The promised ratios; they are promised of the full-size case only."""
    forward, training = rows["chunked forward"], rows["chunked forward and backward"]
    found = []

    def figure(name: str, value: float, want: str, met: bool | None, note: str = "") -> None:
        if not judged:
            want, met = "", None
        found.append(Figure(preset="cpu", name=name, value=value, unit="x", want=want, met=met, note=note))

    oracle, steps = rows["recurrence, float64 (the oracle)"], rows["recurrence, float32"]
    if forward.seconds:
        if oracle.seconds:
            ratio = oracle.seconds / forward.seconds
            figure(
                "chunked forward over the step-by-step recurrence",
                ratio,
                f">= {SPEEDUP:g} x",
                ratio >= SPEEDUP,
            )
        if steps.seconds:
            ratio = steps.seconds / forward.seconds
            figure(
                "chunked forward over fused_recurrent_kda",
                ratio,
                "",
                None,
            )
        if training.seconds:
            ratio = training.seconds / forward.seconds
            figure("forward and backward over forward", ratio, f"<= {BACKWARD:g} x", ratio <= BACKWARD)
    for row in (forward, training):
        if row.peak_bytes is not None and row.input_bytes:
            ratio = 1 + row.peak_bytes / row.input_bytes
            figure(
                f"peak memory, inputs included: {row.contender}", ratio, f"<= {MEMORY:g} x", ratio <= MEMORY
            )
    return found


def _peak(step: Callable[[], Any]) -> int:
    """Peak bytes of one call beyond what was there before, results included."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = step()
        peak = tracemalloc.get_traced_memory()[1] - before
        del kept
    finally:
        tracemalloc.stop()
    return peak
