"""``chunk_kda`` in segments of given lengths, beside the fused kernel: ``python -m benchmarks.segment_lengths``.

On a Hopper GPU, K = V = 128, bounded gates. A list of lengths such as ``20x1,28x2,27`` is one segment of 20 chunks of
64 tokens, two of 28 and further ones of 27 (of at least 32 behind 16 of those); ``shipped`` is what a call would have.
Before anything is timed, outputs and final states are held against the float64 oracle on a short call; on the timed
ones segments must be near the fused kernel, and an output must not depend on later tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from benchmarks.few_heads import in_form
from benchmarks.launches import hold, in_turns, inputs_of, on_host
from kdacore.bench import arrays as made
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, Step
from kdacore.bench.results import Results, Row
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths, lengths_behind
from kdacore_reference.oracle import oracle_forward

PRESET = "segment-lengths"
TOKEN_ARRAYS = ("q", "k", "v", "g", "beta")


def parse(text: str) -> SegmentLengths | None:
    """The lengths that ``text`` names; None for those shipped."""
    if text == "shipped":
        return None
    *parts, last = text.split(",")
    middle = int(last)
    pairs = [tuple(map(int, part.split("x"))) for part in parts]
    (first, firsts), (later, laters) = [*pairs, (middle, 0), (middle, 0)][:2]
    return SegmentLengths(first, firsts, later, laters, *lengths_behind(middle))


def in_segments(
    request: Request, inputs: ChunkInputs, lengths: SegmentLengths | None
) -> Callable[[], Outputs]:
    """The call in segments."""
    call = in_form(request, inputs, 2, True)
    if lengths:
        with mock.patch.object(segment_lengths, "lengths_of", lambda request: lengths):
            call()  # makes its plan, which is kept
    return call


def fused(request: Request, inputs: ChunkInputs) -> Callable[[], Outputs]:
    """The call in the fused kernel with clusters of four blocks."""
    return in_form(request, inputs, 4, False)


def gate(case: Case, lists: dict[str, SegmentLengths | None]) -> None:
    """Raises AssertionError where an output is wrong, or depends on later tokens."""
    request, inputs, _ = inputs_of(dataclasses.replace(case, T=2500, H=2), "random")
    want = oracle_forward(request, on_host(inputs))
    for name, lengths in {**lists, "short ones": parse("3x2,10x2,8")}.items():
        hold(f"{name}, against the oracle", in_segments(request, inputs, lengths)(), want)
    request, inputs, arrays = inputs_of(case, "random")
    want = fused(request, inputs)()
    half = dataclasses.replace(case, T=case.T // 2)
    first = {**arrays, **{name: arrays[name][:, : half.T] for name in TOKEN_ARRAYS}}
    half_request = made.request("chunk_kda", half, first)
    half_inputs = inputs._replace(**{name: first[name] for name in TOKEN_ARRAYS})
    for name, lengths in lists.items():
        got = in_segments(request, inputs, lengths)()
        hold(f"{name}, {case.H} heads, against the fused kernel", got, want)
        if not torch.equal(in_segments(half_request, half_inputs, lengths)().o, got.o[:, : half.T]):
            raise AssertionError(f"{name}, {case.H} heads: later tokens change bits")


def timed(case: Case, lists: dict[str, SegmentLengths | None], budget: Budget) -> list[Row]:
    request, inputs, _ = inputs_of(case, "init")
    steps: dict[str, Step] = {
        f"cuda segments {name}": in_segments(request, inputs, lengths) for name, lengths in lists.items()
    }
    steps["cuda fused"] = fused(request, inputs)
    shape = f"B1 T{case.T} H{case.H} K128 V128{' from a state' if case.initial_state else ''}"
    return in_turns(PRESET, shape, case, steps, budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", nargs="*", default=[], help="for example 20x1,28x2,27 or 26x5,26")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 3072, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, nargs="+", default=[12])
    parser.add_argument("--initial-state", action="store_true")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    lists = {name: parse(name) for name in ("shipped", *args.lengths)}
    rows: list[Row] = []
    with torch.no_grad():
        for heads in args.heads:
            case = Case(name="timed", H=heads, initial_state=args.initial_state)
            gate(case, lists)
            for tokens in args.tokens:
                rows += timed(dataclasses.replace(case, T=tokens), lists, Budget(args.samples, 20.0))
    if args.json:
        results.write(args.json, results.document(Results(rows, []), [PRESET], load))


if __name__ == "__main__":
    main()
