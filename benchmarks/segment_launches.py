"""Each launch of ``chunk_kda`` in segments, the fused kernel, Triton: ``python -m benchmarks.segment_launches``.

On a Hopper GPU, K = V = 128, few heads. Before anything is timed, outputs and final states are held against the float64
oracle on a short call, and against the fused kernel on the timed one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import torch

from benchmarks.cuda_launches import buffers_of, separately
from benchmarks.few_heads import in_form
from benchmarks.launches import hold, inputs_of, on_host, row
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, interleave
from kdacore.bench.results import Figure, Results, Row
from kdacore.types import ChunkInputs, Request
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.chunk_forward import CHUNK
from kdacore_cuda.forms.segments import launches as segments
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths, choose_lengths
from kdacore_cuda.forms.torch_forward import readable
from kdacore_reference.oracle import oracle_forward
from kdacore_triton import chunk_forward as triton

PRESET = "segment-launches"


def gate(case: Case) -> None:
    """Raises AssertionError where an output is wrong."""
    short = Case(name="short", T=2500, H=2, gate=case.gate)
    for gates in ("random", "init"):
        request, inputs, _ = inputs_of(short, gates)
        want = oracle_forward(request, on_host(inputs))
        hold(f"segments against the oracle, {gates}", in_form(request, inputs, 2, True)(), want)
    request, inputs, _ = inputs_of(case, "random")
    want = chunk_forward.forward(request, inputs)
    hold("segments against the fused kernel", in_form(request, inputs, 2, True)(), want)


def launches(request: Request, inputs: ChunkInputs) -> dict[str, Step]:
    """The launches of a call in segments, each on what the ones before it left."""
    r, made = request, segments.launches_of(request)
    given, layout = readable(CHUNK, r, inputs)
    arrays = given._asdict() | {"o": torch.empty_like(inputs.v)} | buffers_of(made, inputs.v)
    if r.output_final_state:
        arrays["final_state"] = inputs.v.new_empty(r.state_shape, dtype=getattr(torch, r.state_dtype))
    steps = separately(made, layout, inputs.v, arrays)
    for run in steps.values():
        run()
    return steps


def contenders(case: Case, gates: str, only_segments: bool = False) -> dict[str, Step]:
    """By name: the launches, all of them, the fused kernel (``main`` turns segments off), Triton."""
    request, inputs, _ = inputs_of(case, gates)
    steps = {f"segments {name}": step for name, step in launches(request, inputs).items()}
    steps["segments all"] = in_form(request, inputs, 2, True)
    if not only_segments:
        steps["fused all"] = lambda: chunk_forward.forward(request, inputs)
        steps["triton all"] = lambda: triton.forward(request, inputs)
    return steps


def timed(
    case: Case, lengths: SegmentLengths, only_segments: bool, budget: Budget
) -> tuple[list[Row], list[Figure]]:
    """Rows of one case, with segments of these lengths, and how the others compare."""

    def with_lengths(request: Request) -> SegmentLengths:
        return lengths

    with mock.patch.object(segment_lengths, "lengths_of", with_lengths):
        gate(case)
        found = interleave(contenders(case, "init", only_segments), CudaClock(), budget)
    shape = f"B1 T{case.T} H{case.H} K128 V128 {case.gate}, segments of {_chunks(lengths, case)} chunks"
    rows = [
        row(PRESET, shape, case, name, "triton" if name.startswith("triton") else "cuda", t)
        for name, t in found.items()
    ]
    figures = [
        Figure(
            preset=PRESET, name=f"{shape}: {other} over segments",
            value=found[f"{other} all"].median / found["segments all"].median, unit="x", want="", met=None,
        )
        for other in ("fused", "triton")
        if f"{other} all" in found
    ]  # fmt: skip
    print(shape, "us:", ", ".join(f"{name} {1e6 * t.median:.1f}" for name, t in found.items()), flush=True)
    return rows, figures


def _chunks(lengths: SegmentLengths, case: Case) -> str:
    """How long the segments of a case are, in chunks."""
    found = dict.fromkeys(lengths.of(i) for i in range(lengths.segments(-(-case.T // 64))))
    return ", then ".join(map(str, found))


def _chosen(args: argparse.Namespace, heads: int) -> list[SegmentLengths]:
    """The lengths to be timed."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    shipped = choose_lengths(heads, multiprocessors, packed=False)
    return [
        *([] if args.chunks or args.long else [shipped]),
        *map(SegmentLengths.uniform, args.chunks),
        *[shipped._replace(middle=chunks, long=chunks) for chunks in args.long],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument(
        "--chunks",
        type=int,
        nargs="+",
        default=[],
        help="of every segment, one after the other; default: as shipped",
    )
    parser.add_argument(
        "--long",
        type=int,
        nargs="+",
        default=[],
        help="chunks of all segments behind the first 8192 tokens, one after the other; the others as shipped",
    )
    parser.add_argument("--only-segments", action="store_true", help="neither the fused kernel nor Triton")
    parser.add_argument("--gate", choices=("sigmoid", "softplus"), default="sigmoid")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    rows: list[Row] = []
    figures: list[Figure] = []
    with (
        mock.patch.object(choice, "use_segments", lambda *given: False),
        torch.no_grad(),
    ):
        for heads in args.heads:
            case = Case(name="timed", T=args.tokens, H=heads, gate=args.gate)
            for lengths in _chosen(args, heads):
                more = timed(case, lengths, args.only_segments, Budget(args.samples, 30.0))
                rows += more[0]
                figures += more[1]
    if args.json:
        results.write(args.json, results.document(Results(rows, figures), [PRESET], load))


if __name__ == "__main__":
    main()
