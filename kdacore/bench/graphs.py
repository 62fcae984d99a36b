"""Decode steps as a server runs them: launches of a CUDA graph, each on states that the caches no longer hold.

A single launch between two events pays for the events, and behind an L2 flush for writing the flush's own lines back:
``mul_`` on 32 MB reads 12 us there, 8 of them its own. In a graph every launch finds what the one before left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kdacore.bench.arrays import Arrays
from kdacore.bench.cases import Case
from kdacore.bench.clock import Step

POOL_BYTES = 2**30
"""States of all launches together: many times any L2."""
LAUNCHES = (4, 128)
"""The least and the most launches in a graph."""
REPLAYS = 3
"""Replays in one sample."""


def launches(case: Case) -> int:
    """How many launches it takes for their states to fill the pool."""
    return launches_of(case.N * case.value_heads * case.K * case.V * 4)


def launches_of(state_bytes: int, most: int = LAUNCHES[1]) -> int:
    """The same, up to ``most``, from the bytes of one launch's states."""
    return max(LAUNCHES[0], min(most, POOL_BYTES // state_bytes))


def capture(case: Case, call: Callable[[Arrays], Any], arrays: Arrays) -> Step:
    """A step that replays the graph :data:`REPLAYS` times. Every launch has a part of the pool to itself."""
    count = launches(case)
    pool = arrays["initial_state"].repeat(count, 1, 1, 1)
    rows = (slice(i * case.N, (i + 1) * case.N) for i in range(count))
    return record(call, [{**arrays, "initial_state": pool[r]} for r in rows])


def record(call: Callable[[Arrays], Any], steps: Sequence[Arrays], warm_ups: int = 2) -> Step:
    """A step that replays a graph of ``call`` on each of ``steps``, :data:`REPLAYS` times."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a call does only once must not be captured
        for _ in range(warm_ups):
            call(steps[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for step in steps:
            kept.append(call(step))

    def replay(_: Any = (steps, kept)) -> None:  # the graph reads and writes these
        for _ in range(REPLAYS):
            graph.replay()

    return replay


class GraphClock:
    """Seconds of one launch."""

    def __init__(self, case: Case) -> None:
        self._launches = launches(case)

    def __call__(self, step: Step) -> float:
        return seconds_of(step, self._launches)


def seconds_of(step: Step, launches: int) -> float:
    """Seconds of one launch of a step made by :func:`record`, whose graph has so many."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3 / (launches * REPLAYS)
