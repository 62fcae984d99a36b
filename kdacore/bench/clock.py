"""Timing: medians of interleaved samples, on the device's own clock where there is one."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kdacore.progress import within

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median, and the quartiles around it."""

    median: float
    low: float
    high: float
    samples: int


def summary(samples: Sequence[float]) -> Timing:
    """Median and quartiles of at least one sample."""
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0], 1)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(statistics.median(samples), low, high, len(samples))


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to measure one case: until every contender has ``samples``, or ``seconds`` have gone by."""

    samples: int = 30
    seconds: float = 20.0
    least: int = 3


def interleave(steps: dict[str, Step], sample: Callable[[Step], float], budget: Budget) -> dict[str, Timing]:
    """Take turns, so that a change of clock speed or load meets every contender alike."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    begun = time.perf_counter()
    for turn in range(budget.samples):
        if turn >= budget.least and time.perf_counter() - begun > budget.seconds:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(sample(steps[name]))
        spent = (time.perf_counter() - begun) / budget.seconds
        within(0.5 + 0.5 * max((turn + 1) / budget.samples, min(spent, 1.0)))
    return {name: summary(samples) for name, samples in found.items()}


class HostClock:
    """Wall time of a call whose result is waited for: CPUs, and any library that has no timer of its own."""

    def __init__(self, wait: Callable[[Any], Any] | None = None) -> None:
        self._wait = wait

    def __call__(self, step: Step) -> float:
        start = time.perf_counter()
        result = step()
        if self._wait is not None:
            self._wait(result)
        return time.perf_counter() - start


class CudaClock:
    """Time on the GPU with a cold L2 cache. The GPU is kept busy until the host has queued the whole call.

    The cache is emptied by reading: written lines would have to go back to memory while the call runs, up to 60 MB of
    traffic that is not the call's own (1 us of 12 for a decode step of 8 sequences, 3 of 38 for 32). Lines that a call
    asked to stay longer than others would outlive that, to the cost of whoever is timed next: the driver makes them
    lines like others first.
    """

    FLUSH_BYTES = 256 * 2**20
    CYCLES = 2.0e9
    """Upper bound of the clock rate, so that the pause is long enough."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._flush = torch.zeros(self.FLUSH_BYTES // 8, dtype=torch.int64, device="cuda")
        self._driver = (
            None if torch.version.hip else ctypes.CDLL("libcuda.so.1")
        )  # other GPUs have no such lines
        self._queueing: dict[int, float] = {}

    def __call__(self, step: Step) -> float:
        torch = self._torch
        pause = self._queueing.get(id(step))
        if pause is None:
            pause = self._queueing[id(step)] = self._queue_seconds(step)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._empty_cache()
        torch.cuda._sleep(int(pause * self.CYCLES))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3

    def _empty_cache(self) -> None:
        status = self._driver.cuCtxResetPersistingL2Cache() if self._driver else 0
        if status:
            raise RuntimeError(f"cuCtxResetPersistingL2Cache failed with CUDA error {status}")
        self._flush.sum()

    def _queue_seconds(self, step: Step) -> float:
        """Twice what the host needs to queue the call, at most 50 ms."""
        seconds = [host_seconds(step, self._torch.cuda.synchronize) for _ in range(5)]
        return min(2 * statistics.median(seconds), 0.05)


def host_seconds(step: Step, wait: Callable[[], Any]) -> float:
    """How long a call keeps the host busy; the device is idle when it starts and is not waited for."""
    wait()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    wait()
    return seconds


BURST = 16
"""Calls in a sample of :func:`busy_seconds`."""


def busy_seconds(step: Step, wait: Callable[[], Any]) -> float:
    """How long a call keeps the host busy when calls follow one another and none is waited for: the mean of a burst.

    A first call, not counted, wakes the device.
    """
    wait()
    step()
    start = time.perf_counter()
    for _ in range(BURST):
        step()
    seconds = (time.perf_counter() - start) / BURST
    wait()
    return seconds


def clock_for(kind: str, device: str) -> Callable[[Step], float]:
    """The clock of an array library on a device."""
    if kind == "torch" and device.startswith("cuda"):
        return CudaClock()
    if kind == "jax":
        import jax

        return HostClock(jax.block_until_ready)
    return HostClock()


def waiter(kind: str, device: str) -> Callable[[], Any]:
    """Waits for everything queued on a device."""
    if kind == "torch" and device.startswith("cuda"):
        import torch

        synchronize: Callable[[], Any] = torch.cuda.synchronize
        return synchronize
    return lambda: None
