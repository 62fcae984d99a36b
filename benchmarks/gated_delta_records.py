"""The forward of the gated delta rule with its records made before or beside the walks:
``python -m benchmarks.gated_delta_records``.

On a Hopper GPU, the cases of ``kdacore bench --preset h200-gdn`` that compute their decays, or those that ``--cases``
names. Before anything is timed a short call is held against the float64 oracle, and every other way to the same bits,
on the timed arrays.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.launches import hold, in_turns, on_host
from kdacore.bench import arrays as made
from kdacore.bench import results
from kdacore.bench.cases import PRESETS, Case
from kdacore.bench.clock import Budget
from kdacore.bench.results import Results, Row
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import choice
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.gated_delta import forward as gated_delta
from kdacore_cuda.gated_delta_variant import state_parts
from kdacore_reference.oracle import oracle_forward

PRESET = "gated-delta-records"
WAYS = ("shipped", "before", "beside")


@contextmanager
def forced(way: str) -> Iterator[None]:
    """Plans made inside have records made so; few heads are not cut."""
    with ExitStack() as stack:
        if way != "shipped":
            stack.enter_context(mock.patch.object(choice, "most_cut", lambda count: 0))
            stack.enter_context(
                mock.patch.object(choice, "use_records_beside", lambda *given: way == "beside")
            )
        yield


def call(request: Request, inputs: ChunkInputs, way: str) -> Callable[[], Outputs]:
    """The call, with a request of its own, since plans are kept by request."""
    own = dataclasses.replace(request)
    with forced(way):
        chosen(own)
        gated_delta.forward(own, inputs)
    return lambda: gated_delta.forward(own, inputs)


def inputs_of(case: Case, gates: str) -> tuple[Request, ChunkInputs]:
    x = made.make(case, gates, "cuda")
    inputs = ChunkInputs(**{name: x.get(name) for name in ChunkInputs._fields})
    return made.request(case.op, case, x), inputs


def served(request: Request, ways: list[str]) -> list[str]:
    """Those that can serve a call: two launches side by side need room for both."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    beside = count > state_parts(request) * request.N * request.HV
    return [way for way in ways if way != "beside" or beside]


def gate(case: Case, ways: list[str]) -> None:
    """Raises AssertionError where a result is wrong."""
    lengths = tuple(min(n, 500) for n in case.lengths)
    short = dataclasses.replace(case, B=min(case.B, 2), T=sum(lengths) or 700, lengths=lengths)
    request, inputs = inputs_of(short, "random")
    want = oracle_forward(request, on_host(inputs))
    for way in served(request, ways):
        hold(f"{case.name}, {way}, against the oracle", call(request, inputs, way)(), want)
    request, inputs = inputs_of(case, "random")
    want = call(request, inputs, "before")()
    for way in served(request, [way for way in ways if way not in ("before", "shipped")]):
        run = call(request, inputs, way)
        for _ in range(20):
            if not torch.equal(run().o, want.o):
                raise AssertionError(f"{case.name}: other bits with records made {way}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="*", help="names of cases of h200-gdn; default: all")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    cases = [c for c in PRESETS["h200-gdn"] if c.gate_inside and (not args.cases or c.name in args.cases)]
    if not cases:
        parser.error(f"--cases: none of {args.cases} is a case of h200-gdn")
    rows: list[Row] = []
    with torch.no_grad():
        for case in cases:
            gate(case, args.ways)
            request, inputs = inputs_of(case, "init")
            steps = {f"cuda {way}": call(request, inputs, way) for way in served(request, args.ways)}
            rows += in_turns(PRESET, case.name, case, steps, Budget(args.samples, 20.0))
    if args.json:
        results.write(args.json, results.document(Results(rows, []), [PRESET], load))


if __name__ == "__main__":
    main()
