"""The search of ``kdacore tune configs``: which launch configuration is fastest on this device.

For each job of a backend (:class:`kdacore.command_types.TuningJob`) one parameter is varied at a time, from the shipped
configuration, for as long as something gets faster. Only correct configurations are timed: each first runs a small
call of the same kind on the device, and its results are compared with the float64 oracle's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kdacore.bench.clock import Budget, CudaClock, interleave
from kdacore.bench.gate import BOUNDS
from kdacore.command_types import Config, TuningJob
from kdacore.oracle.host_values import to_float64
from kdacore.oracle.recurrence import oracle_forward
from kdacore.oracle.stages import oracle_chunk_intra
from kdacore.selfcheck.check import relative_error
from kdacore.types import Device, Outputs

GAIN = 0.99
"""A configuration replaces another when it takes less than this part of its time: smaller differences are noise."""

_ROUNDS = 2

Sample = Callable[[Callable[[], Any]], float]


@dataclass
class Trial:
    """One configuration: seconds, or why it has none."""

    config: dict[str, Any]
    seconds: float | None = None
    error: float | None = None
    """Worst error against the oracle, as a part of its bound."""
    note: str = ""


@dataclass
class Tuned:
    """The outcome of a job."""

    job: TuningJob
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    """None when not even the shipped configuration ran and was right."""

    @property
    def config(self) -> dict[str, Any]:
        """What the data file is to say: the fastest, or what it said before."""
        return dict(self.job.config) if self.best is None else self.best.config

    @property
    def gain(self) -> float:
        """How many times faster than what was shipped."""
        shipped = next((t.seconds for t in self.trials if t.config == dict(self.job.config)), None)
        return shipped / self.best.seconds if shipped and self.best and self.best.seconds else 1.0


def tune(
    job: TuningJob, device: Device, budget: Budget, report: Callable[[str], None], clock: Sample | None = None
) -> Tuned:
    """Search one job's space; ``report`` is called with a line about what is tried."""
    search = _Search(job, device, budget, clock or CudaClock())
    report(f"{job.name}: shipped choice")
    search.measure([dict(job.config)])
    for _ in range(_ROUNDS):
        before = search.best
        for parameter in job.parameters:
            if search.best is not None:
                report(f"{job.name}: {parameter}")
                search.measure([dict(c) for c in job.neighbours(search.best.config, parameter)])
        if search.best is before:
            break
    return Tuned(job, list(search.trials.values()), search.best)


class _Search:
    """Checks and times the configurations of one job."""

    def __init__(self, job: TuningJob, device: Device, budget: Budget, sample: Sample) -> None:
        torch.manual_seed(0)
        self.job, self.budget, self.sample = job, budget, sample
        self.request, self.inputs = job.call(device)
        self.small_request, self.small_inputs = job.small_call(device)
        oracle = oracle_chunk_intra if job.op == "kda_chunk_intra" else oracle_forward
        self.want = _results(oracle(self.small_request, _to_host(self.small_inputs)))
        r = self.small_request
        self.bounds = {"o": BOUNDS[r.dtype]["o"]}
        self.bounds["final_state"] = max(BOUNDS[dtype]["final_state"] for dtype in (r.dtype, r.state_dtype))
        self.trials: dict[str, Trial] = {}
        self.best: Trial | None = None

    def measure(self, candidates: list[dict[str, Any]]) -> None:
        """Time those that are right and new, beside the best so far, and keep the fastest."""
        fresh = []
        for config in candidates:
            if repr(config) not in self.trials:
                trial = self.trials[repr(config)] = self._checked(config)
                if not trial.note:
                    fresh.append(trial)
        if not fresh:
            return
        contest = fresh if self.best is None else [self.best, *fresh]
        steps = {str(i): self._step(trial.config) for i, trial in enumerate(contest)}
        for i, timing in interleave(steps, self.sample, self.budget).items():
            contest[int(i)].seconds = timing.median
        fastest = min(contest, key=lambda t: t.seconds or 0.0)
        if self.best is None or (fastest.seconds or 0.0) < GAIN * (self.best.seconds or 0.0):
            self.best = fastest

    def _step(self, config: Config) -> Callable[[], Any]:
        return lambda: self.job.run(config, self.request, self.inputs)

    def _checked(self, config: dict[str, Any]) -> Trial:
        """Is it right on a small call, and does it launch on the one to be timed?"""
        trial = Trial(config)
        inputs = _own_state(self.small_inputs)
        try:
            got = _results(self.job.run(config, self.small_request, inputs), inputs)
            self.job.run(config, self.request, self.inputs)
        except (
            RuntimeError
        ) as error:  # too much shared memory, or the compiler gave up; a broken device raises below
            trial.note = (
                str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if not trial.note:
            trial.error = max(relative_error(got[n], x) / self.bounds[n] for n, x in self.want.items())
            if not trial.error <= 1.0:
                trial.note = f"wrong: {trial.error:.3g} times the error allowed"
        return trial


def _results(found: Any, inputs: Any = None) -> dict[str, Any]:
    """Arrays to compare, float64 on the host, under the names of their bounds."""
    if isinstance(found, Outputs):
        state = found.final_state if found.final_state is not None else getattr(inputs, "initial_state", None)
        return {n: to_float64(x) for n, x in (("o", found.o), ("final_state", state)) if x is not None}
    return {"o": to_float64(found.Aqk), "final_state": to_float64(found.Akk)}


def _own_state(inputs: Any) -> Any:
    state = getattr(inputs, "initial_state", None)
    return inputs if state is None else inputs._replace(initial_state=state.clone())


def _to_host(inputs: Any) -> Any:
    return type(inputs)(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs))
