"""The forms of ``chunk_kda`` for few heads, each forced in turn: ``python -m benchmarks.few_heads``.

On a Hopper GPU, K = V = 128, no gradients: the fused kernel with clusters of two and of four blocks, segments, and
Triton. Before anything is timed, outputs and final states are held against the float64 oracle on a short call; on the
timed one clusters of four must have the bits of clusters of two, and segments must be near them.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.launches import hold, in_turns, inputs_of, on_host
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, Step
from kdacore.bench.results import Results, Row
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_reference.oracle import oracle_forward
from kdacore_triton import chunk_forward as triton

PRESET = "few-heads"
CLUSTERS = (2, 4)


@contextmanager
def forced(cluster: int, segments: bool, dataflow: bool = False) -> Iterator[None]:
    """Plans made inside take this form."""
    with (
        mock.patch.object(choice, "cluster_size", lambda *given: cluster),
        mock.patch.object(choice, "use_segments", lambda *given: segments),
        mock.patch.object(choice, "use_dataflow", lambda *given: dataflow),
    ):
        yield


def in_form(
    request: Request, inputs: ChunkInputs, cluster: int, segments: bool, dataflow: bool = False
) -> Callable[[], Outputs]:
    """The call in one form. It has a request of its own, since plans are kept by request."""
    own = dataclasses.replace(request)
    with forced(cluster, segments, dataflow):
        chosen(own)
    return lambda: chunk_forward.forward(own, inputs)


def forms(request: Request, inputs: ChunkInputs) -> dict[str, Callable[[], Outputs]]:
    """Calls by form."""
    found = {f"cuda clusters of {size}": in_form(request, inputs, size, False) for size in CLUSTERS}
    found["cuda segments"] = in_form(request, inputs, 2, True)
    found["cuda side-by-side"] = in_form(request, inputs, 2, False, True)
    return found


def gate(case: Case) -> None:
    """Raises AssertionError where an output is wrong."""
    for heads in (2, 33):
        request, inputs, _ = inputs_of(dataclasses.replace(case, name="short", T=1100, H=heads), "random")
        want = oracle_forward(request, on_host(inputs))
        for name, call in forms(request, inputs).items():
            hold(f"{name}, {heads} heads, against the oracle", call(), want)
    request, inputs, _ = inputs_of(case, "random")
    calls = forms(request, inputs)
    want = calls["cuda clusters of 2"]()
    for size in CLUSTERS[1:]:
        got = calls[f"cuda clusters of {size}"]()
        same = torch.equal(got.o, want.o) and (
            want.final_state is None or torch.equal(got.final_state, want.final_state)
        )
        if not same:
            raise AssertionError(f"{case.name}: clusters of {size} and of 2 have different bits")
    hold("segments against the fused kernel", calls["cuda segments"](), want)


def timed(case: Case, budget: Budget) -> list[Row]:
    request, inputs, _ = inputs_of(case, "init")
    steps: dict[str, Step] = {**forms(request, inputs), "triton all": lambda: triton.forward(request, inputs)}
    return in_turns(PRESET, f"B1 T{case.T} H{case.H} K128 V128 {case.gate}", case, steps, budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 12, 16, 20, 24, 28, 32, 36, 40])
    parser.add_argument("--gate", choices=("sigmoid", "softplus"), default="sigmoid")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    rows: list[Row] = []
    with torch.no_grad():
        gate(Case(name="gate", T=4096, H=33, gate=args.gate))
        for tokens in args.tokens:
            for heads in args.heads:
                rows += timed(
                    Case(name="timed", T=tokens, H=heads, gate=args.gate), Budget(args.samples, 30.0)
                )
    if args.json:
        results.write(args.json, results.document(Results(rows, []), [PRESET], load))


if __name__ == "__main__":
    main()
