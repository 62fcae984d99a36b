"""Runs cases: inputs, the correctness gate, then interleaved timing of whoever passed it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdacore.bench import arrays as made
from kdacore.bench import clock, gate, graphs
from kdacore.bench.arrays import Arrays
from kdacore.bench.cases import Case, Goal
from kdacore.bench.clock import Budget, Step, Timing
from kdacore.bench.contenders import Contender, kdacore_contenders, peer_contenders
from kdacore.bench.results import Figure, Results, Row
from kdacore.progress import within

SAME_TIME = 1.1
"""Two medians closer than this count as the same."""
SETTLE = 0.5
"""Seconds of host calls before any is timed. Worker threads of the libraries that the oracle uses go on spinning for a
while after their work, on cores that the caller shares; and a core that has slept runs slower at first."""
BURSTS = 200
"""Samples of host calls for each one asked for. A sample is a third of a millisecond, and a core that others share may
be half as fast for a second."""

GRADIENTS = (*gate.GRADIENTS, "A_log", "dt_bias")
"""Of the arrays that a case has."""


def run_case(
    preset: str,
    case: Case,
    gates: str,
    device: str,
    only: tuple[str, ...],
    budget: Budget,
    peers: tuple[str, ...] = (),
) -> Results:
    """Every contender on one case and one gate set, the skipped ones with their reason.

    ``only`` and ``peers`` name the backends and the peers there are to be; all where empty.
    """
    contenders = [*kdacore_contenders(case, device, only), *peer_contenders(case, device, peers)]
    arrays = made.make(case, gates, device)
    do = made.output_gradient(case, arrays) if case.trains else None
    want = gate.expected(case, arrays, do)
    about = {
        "preset": preset,
        "case": case.name,
        "phase": case.phase,
        "gates": gates,
        "shape": shape(case),
        "dtype": case.dtype,
        "device": f"{case.kind} {device}",
        "input_bytes": made.nbytes(arrays),
    }
    ready: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for i, c in enumerate(contenders):
        within(0.5 * i / len(contenders))  # the other half is for the timings
        row = rows[c.name] = {**about, "contender": c.name, "auto": c.auto, "note": c.note}
        if c.refusal or c.call is None:
            row.update(status="skipped", note=c.refusal)
            continue
        try:
            verdict, peak = _check(case, c.call, arrays, do, want, device)
        except Exception as error:  # noqa: BLE001  a contender may fail in any way; its row says how
            row.update(
                status="FAILED", note=repr(error)[:300], backend=", ".join(c.ran), form="; ".join(c.forms)
            )
            continue
        row.update(error=verdict.error, bound=verdict.bound, peak_bytes=peak)
        row.update(backend=", ".join(c.ran), form="; ".join(c.forms))
        if not verdict.ok:
            row.update(status="wrong", note=f"{verdict.what} is off")
            continue
        own = own_arrays(case, arrays)
        try:
            ready[c.name] = step_of(case, c, c.call, own, do)
        except Exception as error:  # noqa: BLE001  as above: a capture may fail in any way
            row.update(status="FAILED", note=repr(error)[:300])
            continue
        row["status"] = "ok"
    timings = _time(case, ready, device, budget) if ready else {}
    for name, timing in timings.items():
        rows[name].update(seconds=timing.median, low=timing.low, high=timing.high, samples=timing.samples)
    results = Results([Row(**row) for row in rows.values()])
    results.figures += _figures(preset, case, gates, results.rows)
    return results


def shape(case: Case) -> str:
    """Sizes in one word."""
    text = f"B{case.B} T{case.T} H{case.H} HV{case.value_heads} K{case.K} V{case.V}"
    return f"{text} N{case.N}" if case.lengths else text


def _check(
    case: Case, call: Callable[[Arrays], Any], arrays: Arrays, do: Any, want: gate.Expected, device: str
) -> tuple[gate.Verdict, int | None]:
    """One call on the very inputs to be timed, held against the oracle; and the memory it took."""
    own = own_arrays(case, arrays)
    with _peak_memory(case, device) as peak:
        o, state, gradients = run_once(case, call, own, do)
    return gate.judge(case, want, o, state, gradients), peak[0] if peak else None


def run_once(
    case: Case, call: Callable[[Arrays], Any], arrays: Arrays, do: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Output, final state and gradients of one call; no gradients where ``do`` is None."""
    if do is None:
        return (*call(arrays), {})
    import torch

    leaves = {name: arrays[name] for name in GRADIENTS if name in arrays}
    o, state = call(arrays)
    found = torch.autograd.grad((o,), tuple(leaves.values()), (do,))
    return o.detach(), state, dict(zip(leaves, found, strict=True))


def step_of(case: Case, c: Contender, call: Callable[[Arrays], Any], arrays: Arrays, do: Any) -> Step:
    """What is timed."""
    if case.phase == "graph":
        return graphs.capture(case, call, arrays)
    if case.phase == "host" and c.bind is not None:
        return c.bind(arrays)
    return lambda: run_once(case, call, arrays, do)


def own_arrays(case: Case, arrays: Arrays) -> Arrays:
    """What a contender may write to, or collect gradients on, is its own."""
    own = dict(arrays)
    if "initial_state" in own and case.kind != "jax":
        state = own["initial_state"]
        own["initial_state"] = state.clone() if case.kind == "torch" else state.copy()
    if case.trains:
        for name in GRADIENTS:
            if name in own:
                own[name] = own[name].detach().requires_grad_()
    return own


def _time(case: Case, steps: dict[str, Step], device: str, budget: Budget) -> dict[str, Timing]:
    wait = clock.waiter(case.kind, device)
    for step in steps.values():  # a second warm call: the first may still have built something
        step()
    wait()
    if case.phase == "graph":
        return clock.interleave(steps, graphs.GraphClock(case), budget)
    if case.phase in ("host", "host-training"):
        _settle(steps, wait)
        bursts = Budget(BURSTS * budget.samples, budget.seconds, budget.least)
        return clock.interleave(steps, lambda step: clock.busy_seconds(step, wait), bursts)
    return clock.interleave(steps, clock.clock_for(case.kind, device), budget)


def _settle(steps: dict[str, Step], wait: Callable[[], Any]) -> None:
    until = time.perf_counter() + SETTLE
    while time.perf_counter() < until:
        for step in steps.values():
            clock.busy_seconds(step, wait)


@contextlib.contextmanager
def _peak_memory(case: Case, device: str) -> Iterator[list[int]]:
    """Peak device memory beyond what was there; empty where nothing counts it."""
    peak: list[int] = []
    if case.kind != "torch" or not device.startswith("cuda"):
        yield peak
        return
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield peak
    torch.cuda.synchronize()
    peak.append(torch.cuda.max_memory_allocated() - before)


def _figures(preset: str, case: Case, gates: str, rows: list[Row]) -> list[Figure]:
    """Our best against each peer in the same run, and each of ours against what it has to reach."""
    ours = [r.seconds for r in rows if r.seconds is not None and r.contender.startswith("kdacore")]
    if not ours:
        return []
    best = min(ours)
    fastest = next(r for r in rows if r.seconds == best)
    name = f"{case.name}, {case.phase}, {gates}"
    figures = []
    for r in rows:
        if r.seconds is None or r.contender.startswith("kdacore"):
            continue
        figures.append(
            Figure(
                preset=preset,
                name=f"{name}: times faster than {r.contender}",
                value=r.seconds / best,
                unit="x",
                want="> 1",
                met=best < r.seconds,
                note=r.note,
            )
        )
    figures += _goal_figures(preset, case, name, rows)
    if case.memory is not None and fastest.peak_bytes is not None:
        peak = fastest.peak_bytes
        figures.append(
            Figure(
                preset=preset,
                name=f"{name}: peak beyond inputs",
                value=peak / 2**30,
                unit="GiB",
                want=f"<= {case.memory / 2**30:.2f} GiB, aim half",
                met=peak <= case.memory,
            )
        )
    return figures


def _goal_figures(preset: str, case: Case, name: str, rows: list[Row]) -> list[Figure]:
    """Each of our backends against its own goal in seconds."""
    figures = []
    for r in rows:
        goal = case.goals.get(r.contender.removeprefix("kdacore "))
        if r.seconds is None or goal is None or goal.of:
            continue
        unit, scale = next((unit, scale) for unit, scale in UNITS if goal.must * scale >= 1)
        published = "" if case.peer is None else f"peer published {case.peer * scale:g} {unit}"
        figures.append(
            judged(preset, f"{name}, {r.backend}", r.seconds * scale, unit, scale, goal, published)
        )
    return figures


UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))


def judged(
    preset: str, name: str, value: float, unit: str, scale: float, goal: Goal, note: str = ""
) -> Figure:
    """A time, or a multiple of one, in ``unit`` against its goal, which ``scale`` brings to that unit."""
    aim = "" if goal.aim is None else f", aim {goal.aim * scale:g}"
    want = f"<= {goal.must * scale:g} {unit}{aim}"
    met = value <= goal.must * scale
    return Figure(preset=preset, name=name, value=value, unit=unit, want=want, met=met, note=note)


def goals_of_other_cases(preset: str, cases: Sequence[Case], rows: list[Row]) -> list[Figure]:
    """Each backend against goals that are multiples of its own time in another case, where both were timed."""
    times = {
        (r.case, r.gates, r.contender.removeprefix("kdacore ")): r.seconds
        for r in rows
        if r.preset == preset and r.seconds is not None
    }
    return [
        judged(
            preset,
            f"{case.name}, {case.phase}, {gates}, {backend}: over {goal.of}",
            mine / base,
            "x",
            1.0,
            goal,
        )
        for case in cases
        for backend, goal in case.goals.items()
        for gates in case.gate_sets
        if goal.of
        and (mine := times.get((case.name, gates, backend))) is not None
        and (base := times.get((goal.of, gates, backend))) is not None
    ]


def gate_dependence(preset: str, rows: list[Row]) -> list[Figure]:
    """How much slower the slower gate set is: a kernel's time must not depend on the values of its gates."""
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if row.preset == preset and row.seconds is not None and row.auto:
            times.setdefault((row.case, row.phase, row.backend), {})[row.gates] = row.seconds
    figures = []
    for (case, phase, backend), by_gates in times.items():
        if len(by_gates) > 1:
            ratio = max(by_gates.values()) / min(by_gates.values())
            name = f"{case}, {phase}, {backend}: slower over faster gate set"
            want = f"<= {SAME_TIME:g} x"
            figures.append(
                Figure(preset=preset, name=name, value=ratio, unit="x", want=want, met=ratio <= SAME_TIME)
            )
    return figures
