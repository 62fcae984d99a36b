"""Measure which launch configurations are fastest on this machine, and write the data file.

For each rule of the shipped data (:mod:`kdacore_triton.configs`) one parameter is varied at a time, from the shipped
choice, for as long as something gets faster. Only correct configurations are timed: each first runs a small call of
the same class against the float64 oracle, on the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kdacore.bench.clock import Budget, CudaClock, interleave
from kdacore.bench.gate import BOUNDS
from kdacore.selfcheck.check import relative_error
from kdacore.types import Device, Outputs
from kdacore_reference.oracle import oracle_forward, to_float64
from kdacore_reference.oracle_stages import oracle_chunk_intra
from kdacore_triton import configs
from kdacore_triton.tune_jobs import Job, make, runner, small

GAIN = 0.99
"""A configuration replaces another when it takes less than this part of its time: smaller differences are noise."""

_ROUNDS = 2
_IDLE = {
    "token": ("BD", "diagonal_warps", "diagonal_stages"),
    "chunk": ("heads", "token_warps"),
}
"""Parameters of the other form of the intra-chunk stage."""

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

    job: Job
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
    job: Job, device: Device, budget: Budget, report: Callable[[str], None], clock: Sample | None = None
) -> Tuned:
    """Search one job's space; ``report`` is called with a line about what is tried."""
    search = _Search(job, device, budget, clock or CudaClock())
    report(f"{job.name}: shipped choice")
    search.measure([dict(job.config)])
    for _ in range(_ROUNDS):
        before = search.best
        for parameter, values in configs.spaces()[job.kernel].params.items():
            if search.best is not None:
                report(f"{job.name}: {parameter}")
                search.measure(list(_neighbours(job.kernel, search.best.config, parameter, values)))
        if search.best is before:
            break
    return Tuned(job, list(search.trials.values()), search.best)


def _neighbours(
    kernel: str, config: Mapping[str, Any], parameter: str, values: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Legal configurations that differ in one parameter."""
    if kernel == "chunk_intra" and parameter in _IDLE[config["form"]]:
        return
    for value in values:
        other = {**config, parameter: value}
        if value != config[parameter] and configs.spaces()[kernel].allows(other):
            yield other


class _Search:
    """Checks and times the configurations of one job."""

    def __init__(self, job: Job, device: Device, budget: Budget, sample: Sample) -> None:
        torch.manual_seed(0)
        self.job, self.budget, self.sample = job, budget, sample
        self.run = runner(job)
        self.request, self.inputs = make(job, job.sizes, device)
        self.small_request, self.small_inputs = make(job, small(job.sizes), device)
        oracle = oracle_chunk_intra if job.kernel == "chunk_intra" else oracle_forward
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

    def _step(self, config: dict[str, Any]) -> Callable[[], Any]:
        def step() -> Any:
            with configs.override(self.job.kernel, config):
                return self.run(self.request, self.inputs)

        return step

    def _checked(self, config: dict[str, Any]) -> Trial:
        """Is it right on a small call, and does it launch on the one to be timed?"""
        trial = Trial(config)
        inputs = _own_state(self.small_inputs)
        try:
            with configs.override(self.job.kernel, config):
                got = _results(self.run(self.small_request, inputs), inputs)
                self.run(self.request, self.inputs)
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


def data_file(arch: str, outcomes: list[Tuned]) -> dict[str, list[dict[str, Any]]]:
    """The content of ``<arch>.json``: the tuned rules, and what is shipped for the kernels not tuned.

    Raises:
        InvalidConfigError: it would not be a legal file.
    """
    rules: dict[str, list[dict[str, Any]]] = {}
    for choice in configs.shipped_for(arch):
        tuned = next(
            (t for t in outcomes if (t.job.kernel, t.job.when) == (choice.kernel, choice.when)), None
        )
        config = dict(choice.config) if tuned is None else tuned.config
        rules.setdefault(choice.kernel, []).append({"when": dict(choice.when), "config": config})
    configs.check(f"{arch}.json", arch, rules)
    return rules


def write(path: Path, rules: dict[str, list[dict[str, Any]]]) -> None:
    """Write a data file as the shipped ones are: one rule a line."""
    kernels = []
    for kernel, choices in rules.items():
        lines = ",\n".join(f"    {json.dumps(rule)}" for rule in choices)
        kernels.append(f"  {json.dumps(kernel)}: [\n{lines}\n  ]")
    path.write_text("{\n" + ",\n".join(kernels) + "\n}\n", encoding="utf-8")
