"""What the benchmarks of single launches share: a case's request and inputs on the GPU, a row for each contender."""

from __future__ import annotations

import argparse
from pathlib import Path

from kdacore.bench import arrays as made
from kdacore.bench.arrays import Arrays
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, Timing, interleave
from kdacore.bench.results import Row
from kdacore.selfcheck.check import relative_error
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_reference.oracle import to_float64

FORWARD_BOUND = 9e-3
"""Twice the contract's bound on outputs of 16-bit inputs: its hard cases, and what two backends may be apart."""


def hold(what: str, got: Outputs, want: Outputs) -> None:
    """Raises AssertionError where outputs or final states are further apart than :data:`FORWARD_BOUND`."""
    found = {
        name: relative_error(to_float64(getattr(got, name)), to_float64(getattr(want, name)))
        for name in ("o", "final_state")
        if getattr(want, name) is not None
    }
    print(f"{what}:", {k: f"{v:.1e}" for k, v in found.items()})
    if not all(v < FORWARD_BOUND for v in found.values()):
        raise AssertionError(f"{what}: {found}")


def training_arguments(doc: str | None) -> tuple[argparse.Namespace, Case]:
    """The command line of a benchmark of one training case, described by the first line of ``doc``, and the case."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--value-heads", type=int, default=0)
    parser.add_argument("--gate", choices=("sigmoid", "softplus"), default="sigmoid")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    case = Case(
        name="timed", phase="training", T=args.tokens, H=args.heads, HV=args.value_heads, gate=args.gate
    )
    return args, case


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


def in_turns(preset: str, shape: str, case: Case, steps: dict[str, Step], budget: Budget) -> list[Row]:
    """Time ``steps`` alternately, print their medians and return a row for each. A step's name begins with the name of
    its backend, as in ``cuda maps``."""
    found = interleave(steps, CudaClock(), budget)
    times = "  ".join(f"{name} {1e6 * t.median:.1f}" for name, t in found.items())
    print(f"{shape:34} {times} us", flush=True)
    return [row(preset, shape, case, name, name.split()[0], t) for name, t in found.items()]
