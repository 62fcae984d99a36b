"""``chunk_kda`` in two launches side by side, in segments and fused: ``python -m benchmarks.few_heads``.

On a Hopper GPU, K = V = 128, bfloat16. Before anything is timed, outputs and final states are held against the float64
oracle on short calls and against the fused kernel on long ones, and have to be the same bits every time, eager and
replayed. Besides whole calls it times each launch alone: the walk on records that lie in L2, prepare on some or all
multiprocessors.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks.launches import inputs_of, on_host, row
from benchmarks.segment_launches import BOUND, hold
from kdacore.bench import results
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, interleave
from kdacore.bench.results import Figure, Results, Row
from kdacore.types import ChunkInputs, Gate, Outputs, Request
from kdacore_cuda import (
    chunk_forward,
    chunk_forward_dataflow,
    chunk_forward_dataflow_kernels,
    chunk_forward_segments,
    torch_launch,
)
from kdacore_cuda.kernel_parameters import WALK
from kdacore_reference.oracle import oracle_forward

PRESET = "few-heads"


def fused(request: Request, inputs: ChunkInputs) -> Outputs:
    """The fused kernel, whatever would be chosen."""
    with (
        mock.patch.object(chunk_forward, "use_dataflow", lambda *args: False),
        mock.patch.object(chunk_forward, "use_segments", lambda items, multiprocessors: False),
        mock.patch.object(
            chunk_forward, "plan_of", mock.Mock(side_effect=lambda r: chunk_forward._make_plan(r))
        ),
    ):
        return chunk_forward.forward(request, inputs)


def gate(gate_kind: Gate) -> None:
    """Raises AssertionError where an output is wrong, or another one the second time."""
    for heads, T in ((1, 40), (2, 1500), (18, 700)):
        request, inputs, _ = inputs_of(Case(name="short", T=T, H=heads, gate=gate_kind), "init")
        got = chunk_forward_dataflow.forward(request, inputs)
        hold(f"H{heads} T{T} against the oracle", got, oracle_forward(request, on_host(inputs)), BOUND)
    for heads in (4, 24):
        request, inputs, _ = inputs_of(Case(name="long", T=8192, H=heads, gate=gate_kind), "random")
        first = chunk_forward_dataflow.forward(request, inputs)
        hold(f"H{heads} T8192 against the fused kernel", first, fused(request, inputs), BOUND)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = chunk_forward_dataflow.forward(request, inputs)
        for _ in range(20):
            replayed.o.zero_()
            graph.replay()
            again = chunk_forward_dataflow.forward(request, inputs)
            if not (torch.equal(replayed.o, first.o) and torch.equal(again.o, first.o)):
                raise AssertionError(f"H{heads}: other bits")


def warm(step: Step) -> float:
    """Seconds of a call that finds in L2 what the one before it left there."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    step()
    torch.cuda._sleep(300_000)
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3


@contextlib.contextmanager
def prepare_on(blocks: int) -> Iterator[None]:
    """Prepare gets so many multiprocessors."""
    kernels = chunk_forward_dataflow_kernels.prepare_units_kernel
    with mock.patch.object(
        chunk_forward_dataflow,
        "prepare_units_kernel",
        lambda *args: kernels(*args)._replace(grid=lambda units, heads, multiprocessors: min(units, blocks)),
    ):
        yield


def alone(request: Request, inputs: ChunkInputs, name: str) -> Step:
    """One launch on what a whole call left. Flags are raised before the walk, which is part of its time."""
    call = chunk_forward_dataflow.prepare_call(request, inputs)
    plan = chunk_forward_dataflow.plan_of(request)
    for _, launcher, grid, values in call.launches:
        torch_launch.launch(launcher, grid, plan.chunks.arch, call.outputs.o, values)
    flags = call.workspace[plan.flags_offset :].view(torch.int64)
    number = dict(zip((n for n, _ in WALK.fields), call.launches[1][3], strict=True))["launch"]
    ((_, launcher, grid, values),) = (x for x in call.launches if x[0] == name)

    def step() -> None:
        if name == "walk":
            flags.fill_(number)
        torch_launch.launch(launcher, grid, plan.chunks.arch, call.outputs.o, values)

    return step


def timed(step: Step, clock: Callable[[Step], float], samples: int) -> float:
    return interleave({"": step}, clock, Budget(samples, 10.0))[""].median


def parts(args: argparse.Namespace) -> list[Figure]:
    """Seconds of a chunk of the walk, of a unit and multiprocessor of prepare."""
    found = []
    for heads in (4, 16):
        times = []
        for T in (1024, 2048):
            request, inputs, _ = inputs_of(Case(name="walk", T=T, H=heads), "init")
            times.append(timed(alone(request, inputs, "walk"), warm, args.samples))
        found.append((f"walk H{heads}: a chunk", (times[1] - times[0]) / 16))
    for blocks in (132, 100, 84):
        with prepare_on(blocks):
            request, inputs, _ = inputs_of(Case(name="prepare", T=8192, H=16), "init")
            seconds = timed(alone(request, inputs, "prepare"), CudaClock(), args.samples)
        found.append((f"prepare on {blocks}: a unit", seconds * blocks / (128 * 16)))
    for name, seconds in found:
        print(f"{name}: {1e6 * seconds:.3f} us")
    return [Figure(preset=PRESET, name=n, value=x, unit="s", want="", met=None) for n, x in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 16, 17, 20, 24, 27, 28, 32])
    parser.add_argument("--gate", choices=("sigmoid", "softplus"), default="sigmoid")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = results.load()
    rows: list[Row] = []
    with torch.no_grad():
        gate(args.gate)
        figures = parts(args)
        for heads in args.heads:
            case = Case(name="timed", T=args.tokens, H=heads, gate=args.gate)
            request, inputs, _ = inputs_of(case, "init")
            ways = (chunk_forward_dataflow.forward, chunk_forward_segments.forward, fused)
            steps: dict[str, Step] = {
                f"{name} all": partial(way, request, inputs)
                for name, way in zip(("side-by-side", "segments", "fused"), ways, strict=True)
            }
            found = interleave(steps, CudaClock(), Budget(args.samples, 30.0))
            shape = f"B1 T{case.T} H{heads} K128 V128 {case.gate}"
            rows += [row(PRESET, shape, case, name, "cuda", t) for name, t in found.items()]
            multiprocessors = torch_launch.multiprocessors(0)
            chosen = chunk_forward_dataflow_kernels.use_dataflow(
                heads, args.gate == "sigmoid", multiprocessors
            )
            times = ", ".join(f"{name} {1e6 * t.median:.1f}" for name, t in found.items())
            print(f"{shape}: {times} us{', side by side is chosen' if chosen else ''}")
    if args.json:
        results.write(args.json, results.document(Results(rows, figures), [PRESET], load))


if __name__ == "__main__":
    main()
