"""Measures a cost table on the device that is here: every backend that automatic choice may take, on every call of
:mod:`kdacore.bench.cost_shapes`. What was measured is kept as it goes, so that an interrupted run goes on from there.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from kdacore import files
from kdacore.bench import arrays as made
from kdacore.bench import gate, runner
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, Step, interleave
from kdacore.bench.contenders import described, kdacore_contenders
from kdacore.calls import requests
from kdacore.dispatch import cost
from kdacore.dispatch.cost_tables import Columns, Group, Table, Variant
from kdacore.dispatch.selection import auto_may_choose
from kdacore.registry import REGISTRY
from kdacore.types import Device

SCHEMA = 1
Sample = Callable[[Step], float]


class DisagreementError(RuntimeError):
    """Two backends gave different results for one call: neither may be timed."""


@dataclass
class Measured:
    """What is there so far, in the file that an interrupted run goes on from."""

    path: Path
    device: Device
    name: str
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Case -> backend -> seconds; a backend that cannot serve the case is left out."""
    disagreements: list[str] = field(default_factory=list)
    """Cases in which backends gave different results. They are not timed."""

    @property
    def backends(self) -> dict[str, str]:
        """Versions: times of other versions are of no use."""
        return {r.backend.name: r.backend.version for r in REGISTRY.backends().values()}

    def load(self) -> bool:
        """Take up what an earlier run left. False where there is nothing, or nothing that goes with this one."""
        try:
            left = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        if not isinstance(left, dict) or {name: left.get(name) for name in self._head()} != self._head():
            return False
        self.seconds = dict(left["seconds"])
        return bool(self.seconds)

    def save(self) -> None:
        """Keep what is there."""
        files.write_whole(self.path, json.dumps({**self._head(), "seconds": self.seconds}) + "\n")

    def _head(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "arch": self.device.arch, "device": self.name, "backends": self.backends}

    def table(self, cases: Sequence[Case]) -> Table:
        """The table of all cases that were measured."""
        points: dict[tuple[str, Group], dict[Variant, dict[int, list[tuple[float, float]]]]] = {}
        for case in cases:
            for backend, seconds in self.seconds.get(case.name, {}).items():
                request = requests.request_of(described(case, self.device.type))
                key = backend, cost.group_of(request)
                columns = points.setdefault(key, {}).setdefault(cost.variant_of(request), {})
                column = columns.setdefault(request.N * request.HV, [])
                column.append((cost.tokens_of(request), float(f"{seconds:.4g}")))
        timed = {backend for backend, _ in points}
        return Table(
            arch=self.device.arch,
            device=self.name,
            when=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            backends={name: version for name, version in self.backends.items() if name in timed},
            times=MappingProxyType({key: _sorted(variants) for key, variants in points.items()}),
        )


def _sorted(variants: dict[Variant, dict[int, list[tuple[float, float]]]]) -> dict[Variant, Columns]:
    return {
        variant: {items: tuple(sorted(column)) for items, column in sorted(columns.items())}
        for variant, columns in variants.items()
    }


def measure(
    measured: Measured,
    cases: Sequence[Case],
    device: str,
    budget: Budget,
    clock: Callable[[Case], Sample],
    seconds: float,
) -> Iterator[Case]:
    """Time the cases that are still missing, yielding each before it is timed; none begins after ``seconds``."""
    end = time.monotonic() + seconds
    for case in cases:
        if case.name in measured.seconds:
            continue
        if time.monotonic() > end:
            return
        yield case
        try:
            measured.seconds[case.name] = seconds_of(case, device, budget, clock(case))
        except DisagreementError as error:
            measured.disagreements.append(str(error))
            continue
        measured.save()


def seconds_of(case: Case, device: str, budget: Budget, clock: Sample) -> dict[str, float]:
    """Seconds of each backend that automatic choice may take for the case, in turns.

    None of those that cannot serve it, or where the device's memory is too small.

    Raises:
        DisagreementError: two backends differ by more than their error bounds together.
    """
    request = requests.request_of(described(case, device))
    able = [
        (c.name, c, c.call)
        for c in kdacore_contenders(case, device, ())
        if c.call and not c.refusal and auto_may_choose(_backend(c.name), request)
    ]
    steps: dict[str, Step] = {}
    results: dict[str, list[Any]] = {}
    try:
        arrays = made.make(case, "init", device)
        do = made.output_gradient(case, arrays) if case.trains else None
        for name, contender, call in able:
            own = runner.own_arrays(case, arrays)
            o, state, gradients = runner.run_once(case, call, own, do)
            compared = [gradients[name] for name in gate.GRADIENTS] if gradients else []
            results[name] = [x for x in (o, state, *compared) if x is not None]
            steps[name] = runner.step_of(case, contender, call, own, do)
        hold_together(case, results)
        results.clear()
        for step in steps.values():  # a second warm call: the first may still have built something
            step()
        timings = interleave(steps, clock, budget) if steps else {}
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        return {}
    return {_backend(name): timing.median for name, timing in timings.items()}


def _backend(contender: str) -> str:
    return contender.removeprefix("kdacore ")


def _is_out_of_memory(error: RuntimeError) -> bool:
    return type(error).__name__ == "OutOfMemoryError"


def hold_together(case: Case, results: dict[str, list[Any]]) -> None:
    """Compare every backend's results with the first's. DisagreementError where they differ too much."""
    if not results:
        return
    (first, ones), *rest = results.items()
    bounds = gate.BOUNDS[case.dtype]
    bound = 2 * max(bounds.values()) if case.trains else 2 * max(bounds["o"], bounds["final_state"])
    for other, others in rest:
        for one, another in zip(ones, others, strict=True):
            error = _relative_difference(one, another)
            if not error <= bound:
                said = f"{first} and {other} differ by {error:.2g}, more than {bound:.2g}"
                raise DisagreementError(f"{case.name}: {said}")


def _relative_difference(one: Any, another: Any) -> float:
    """The norm of the difference over that of the first, of tensors computed where they lie."""
    if hasattr(one, "detach"):
        a, b = one.detach().float(), another.detach().float()
        return float((a - b).norm() / a.norm().clamp_min(1e-30))
    a, b = (np.asarray(x, np.float64) for x in (one, another))
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), 1e-30)
