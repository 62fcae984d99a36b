"""What the benchmarks of single launches share: a case's request and inputs on the GPU, a row for each contender."""

from __future__ import annotations

from kdacore.bench import arrays as made
from kdacore.bench.arrays import Arrays
from kdacore.bench.cases import Case
from kdacore.bench.clock import Timing
from kdacore.bench.results import Row
from kdacore.types import ChunkInputs, Request


def inputs_of(case: Case, gates: str) -> tuple[Request, ChunkInputs, Arrays]:
    """Request and inputs of one case on the GPU, and the arrays by name."""
    x = made.make(case, gates, "cuda")
    inputs = ChunkInputs(**{name: x.get(name) for name in ChunkInputs._fields})
    return made.request("chunk_kda", case, x), inputs, x


def on_host(inputs: ChunkInputs) -> ChunkInputs:
    """The same in the CPU's memory."""
    return ChunkInputs(*(None if a is None else a.cpu() for a in inputs))


def row(preset: str, shape: str, case: Case, contender: str, backend: str, t: Timing) -> Row:
    """What one contender, named ``<whose> <launch>``, took on *init* gates."""
    return Row(
        preset=preset, case=shape, phase=contender.split()[1].rstrip(","), contender=contender, status="ok",
        backend=backend, gates="init", shape=shape, dtype=case.dtype, device="cuda",
        seconds=t.median, low=t.low, high=t.high, samples=t.samples,
    )  # fmt: skip
