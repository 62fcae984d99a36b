"""The chunk backward in segments and in one chain per head: ``python -m benchmarks.backward_segments``.

On a Hopper GPU, K = V = 128, few heads; in segments with maps of its own, and with those that the forward kept. Before
anything is timed, gradients in segments are held against the float64 oracle on a short call, and against those of one
chain per head on the timed one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from benchmarks.backward_launches import BOUND, apart, call_of, cuda_steps
from benchmarks.launches import on_host, row
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, interleave
from kdacore.bench.results import Figure, Results, Row
from kdacore.types import ChunkInputs, Gate, InputGrads, OutputGrads, Request
from kdacore_cuda import choice
from kdacore_cuda.forms import chunk_forward
from kdacore_cuda.forms.backward import gradients as chunk_backward
from kdacore_cuda.forms.backward import segments as chunk_backward_segments
from kdacore_cuda.forms.segments.segment_lengths import backward_segment_chunks
from kdacore_reference.oracle import oracle_backward

PRESET = "backward-segments"


def backward(request: Request, inputs: ChunkInputs, grads: OutputGrads, chunks: int) -> InputGrads:
    """The backward in segments of so many chunks; 0: in one chain per head."""
    with (
        mock.patch.object(choice, "use_segments_backward", lambda items, multiprocessors: chunks > 0),
        mock.patch.object(chunk_backward_segments, "backward_segment_chunks", lambda *given: chunks or 1),
    ):
        return chunk_backward.backward(request, inputs, (), grads)


def with_kept(request: Request, inputs: ChunkInputs) -> tuple[Request, torch.Tensor | None]:
    """The call as one with gradients, and what its forward kept of its segments."""
    request = replace(request, needs_grad=True)
    if chunk_backward.saved_kind(request) != "maps":
        return request, None
    return request, chunk_forward.forward(request, inputs).saved[0]


def hold(what: str, got: InputGrads, want: InputGrads) -> None:
    """Raises AssertionError where they are apart."""
    found = apart(got, want)
    print(f"{what}:", {k: f"{v:.1e}" for k, v in found.items()})
    if not all(v < BOUND for v in found.values()):
        raise AssertionError(f"{what}: {found}")


def gate_oracle(gate: Gate) -> None:
    """Raises AssertionError where a gradient of a short call is wrong."""
    # The gradient of "init" gates is a handful of large numbers, whose rounding does not average out.
    request, inputs, grads = call_of(Case(name="short", phase="training", T=1500, H=2, gate=gate), "random")
    on_cpu = OutputGrads(None if grads.o is None else grads.o.cpu(), None)
    want = oracle_backward(request, on_host(inputs), on_cpu)
    for each in (0, 1, 2):
        name = f"segments of {each}" if each else "chains"
        hold(f"{name} against the oracle", backward(replace(request), inputs, grads, each), want)


def gate_chains(case: Case, chunks: list[int]) -> None:
    """Raises AssertionError where gradients of the timed call in segments are far from those in chains."""
    request, inputs, grads = call_of(case, "random")
    want = backward(replace(request), inputs, grads, 0)
    for each in chunks:
        hold(f"segments of {each} against chains", backward(replace(request), inputs, grads, each), want)
    request, kept = with_kept(request, inputs)
    if kept is not None:
        hold("kept against chains", chunk_backward.backward(request, inputs, (kept,), grads), want)


def contenders(case: Case, chunks: list[int]) -> dict[str, Step]:
    """By name: the launches and the whole backward, in chains and in segments, and the forward."""
    request, inputs, grads = call_of(case, "init")
    steps: dict[str, Step] = {"cuda forward": lambda: chunk_forward.forward(request, inputs)}

    def whole(request: Request, each: int) -> Step:
        return lambda: backward(request, inputs, grads, each)

    for each in (0, *chunks):
        name = f"segments-of-{each}" if each else "chains"
        mine = replace(request)  # plans are kept by request
        with (
            mock.patch.object(choice, "use_segments_backward", lambda items, count, each=each: each > 0),
            mock.patch.object(
                chunk_backward_segments, "backward_segment_chunks", lambda items, each=each: each or 1
            ),
        ):
            launches = cuda_steps(mine, inputs, grads)
        wanted = ("maps", "chain", "scan") if each else ("prepare", "scan", "gradients")
        steps |= {f"{name} {launch}": launches[launch] for launch in wanted if launch in launches}
        steps[f"{name} all"] = whole(mine, each)
    mine, kept = with_kept(request, inputs)
    if kept is not None:
        launches = cuda_steps(mine, inputs, grads, kept)
        steps |= {f"kept {launch}": launches[launch] for launch in ("maps", "chain", "scan", "all")}
        steps["kept forward"] = lambda: chunk_forward.forward(mine, inputs)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 8, 12, 16])
    parser.add_argument("--chunks", type=int, nargs="+", default=[], help="of a segment; none: as shipped")
    parser.add_argument("--gate", choices=("sigmoid", "softplus"), default="sigmoid")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    rows: list[Row] = []
    figures: list[Figure] = []
    gate_oracle(args.gate)
    with torch.no_grad():
        for tokens in args.tokens:
            for heads in args.heads:
                case = Case(name="timed", phase="training", T=tokens, H=heads, gate=args.gate)
                chunks = args.chunks or [backward_segment_chunks(heads)]
                gate_chains(case, chunks)
                found = interleave(contenders(case, chunks), CudaClock(), Budget(args.samples, 30.0))
                shape = f"B1 T{tokens} H{heads} K128 V128 {case.gate}"
                rows += [row(PRESET, shape, case, name, "cuda", t) for name, t in found.items()]
                figures += [
                    Figure(
                        preset=PRESET, name=f"{shape}: chains over segments of {each}",
                        value=found["chains all"].median / found[f"segments-of-{each} all"].median,
                        unit="x", want="", met=None,
                    )
                    for each in chunks
                ]  # fmt: skip
                if "kept all" in found:
                    figures.append(
                        Figure(
                            preset=PRESET, name=f"{shape}: chains over kept segments",
                            value=found["chains all"].median / found["kept all"].median,
                            unit="x", want="", met=None,
                        )
                    )  # fmt: skip
                print(shape)
                for contender, t in found.items():
                    print(f"  {contender:24} {1e3 * t.median:7.3f} ms")
    if args.json:
        results.write(args.json, results.document(Results(rows, figures), [PRESET], load))


if __name__ == "__main__":
    main()
