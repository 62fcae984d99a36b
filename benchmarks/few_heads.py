"""``chunk_kda`` with few heads, launches side by side: ``python -m benchmarks.few_heads``.

On a Hopper GPU, K = V = 128. Before anything is timed, outputs and final states are held against the float64 oracle on short calls and against
the fused kernel on long ones, and must have the same bits every time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.launches import inputs_of, on_host
from benchmarks.segment_launches import BOUND, hold
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, Step, interleave
from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_cuda import chunk_forward, chunk_forward_segments, chunk_forward_segments_kernels, torch_launch
from kdacore_cuda.kernel_parameters import SEGMENTS
from kdacore_reference.oracle import oracle_forward

segments, kernels = chunk_forward_segments, chunk_forward_segments_kernels
WHOLE = kernels.WHOLE_SEQUENCES


class Choice:
    """Replaces the rules of which launches are used while it is entered."""

    def __init__(self, chunks: int = 0, blocks: int = 0, prepare: int = 0) -> None:
        self._stack: list[Any] = []
        if chunks:
            self._stack.append(mock.patch.object(segments, "chunks_per_segment", lambda items: chunks))
        if blocks:
            self._stack.append(
                mock.patch.object(segments, "output_blocks", lambda items, segments, mps: blocks)
            )
        if prepare:
            self._stack.append(
                mock.patch.object(segments, "prepare_blocks", lambda items, blocks, mps: prepare)
            )

    def __enter__(self) -> None:
        segments.plan_of._plans.clear()
        for patch in self._stack:
            patch.start()

    def __exit__(self, *exc: object) -> None:
        for patch in self._stack:
            patch.stop()
        segments.plan_of._plans.clear()


def same(a: Outputs, b: Outputs) -> bool:
    return torch.equal(a.o, b.o) and (a.final_state is None or torch.equal(a.final_state, b.final_state))


def fused(request: Request, inputs: ChunkInputs) -> Outputs:
    with mock.patch.object(chunk_forward, "use_segments", lambda items, multiprocessors: False):
        chunk_forward.plan_of._plans.clear()
        out = chunk_forward.forward(request, inputs)
        chunk_forward.plan_of._plans.clear()
        return out


def gate() -> None:
    """Raises AssertionError where an output is wrong, or another one the second time."""
    short = (
        (1, 40, "sigmoid"),
        (10, 700, "sigmoid"),
        (2, 2500, "sigmoid"),
        (2, 1500, "softplus"),
        (12, 600, "softplus"),
    )
    for heads, T, kind in short:
        request, inputs, _ = inputs_of(Case(name="short", T=T, H=heads, gate=kind), "init")
        got = segments.forward(request, inputs)
        torch.cuda.synchronize()
        hold(f"H{heads} T{T} {kind} against the oracle", got, oracle_forward(request, on_host(inputs)), BOUND)
    for heads, T in ((4, 8192), (8, 8192), (12, 8192), (24, 4096)):
        request, inputs, _ = inputs_of(Case(name="long", T=T, H=heads), "random")
        first = segments.forward(request, inputs)
        hold(f"H{heads} T{T} against the fused kernel", first, fused(request, inputs), BOUND)
        assert all(same(segments.forward(request, inputs), first) for _ in range(20)), heads
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = segments.forward(request, inputs)
        for _ in range(10):
            captured.o.zero_()
            graph.replay()
            assert same(captured, first), heads


def alone(request: Request, inputs: ChunkInputs, name: str) -> Step:
    """One launch on what the ones before it left; every flag is raised first."""
    call = segments.prepare_call(request, inputs)
    plan = segments.plan_of(request)
    arch = plan.chunks.arch
    for _, launcher, grid, values in call.launches:
        torch_launch.launch(launcher, grid, arch, call.outputs.o, values)
    torch.cuda.synchronize()
    number = dict(zip((n for n, _ in SEGMENTS.fields), call.launches[-1][3], strict=True))["launch"]
    flags = call.workspace[plan.segment_flags_offset :].view(torch.int64)
    (_, launcher, grid, values), *_ = [s for s in call.launches if s[0] == name]

    def step() -> None:
        if name != "prepare":
            flags.fill_(number)
        torch_launch.launch(launcher, grid, arch, call.outputs.o, values)

    return step


class WarmClock:
    """Time on the GPU with what is in L2 left there."""

    def __call__(self, step: Step) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        step()
        torch.cuda._sleep(300_000)
        start.record()
        step()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3


def median(step: Step, clock: Callable[[Step], float]) -> float:
    return interleave({"": step}, clock, Budget(15, 6.0))[""].median


def slope(
    case: dict[str, Any], blocks: int, tokens: tuple[int, int], ghz: float, found: dict[str, float]
) -> None:
    """Cycles of a chunk of the walk, records in L2."""
    times = []
    for T in tokens:
        with Choice(WHOLE, blocks):
            request, inputs, _ = inputs_of(Case(name="walk", T=T, **case), "init")
            step = alone(request, inputs, "output")
            times.append(median(step, WarmClock()))
    cycles = (times[1] - times[0]) * ghz * 1e9 / ((tokens[1] - tokens[0]) / 64)
    found[f"walk H{case['H']} blocks {blocks}: cycles a chunk"] = cycles
    print(
        f"walk H{case['H']} blocks {blocks}: {cycles:.0f} cycles a chunk ({1e6 * times[0]:.1f}, {1e6 * times[1]:.1f} us)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 8, 12, 16, 24, 32])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--gates", nargs="+", default=["sigmoid", "softplus"])
    parser.add_argument("--ghz", type=float, default=1.83)
    parser.add_argument("--no-gate", action="store_true")
    parser.add_argument("--parts", action="store_true", help="the walk and prepare alone, too")
    parser.add_argument("--long", action="store_true", help="131072 tokens, too")
    parser.add_argument(
        "--variants", nargs="*", default=[], help="chunks:blocks:prepare, 0: as chosen, -1: whole"
    )
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    torch.set_grad_enabled(False)
    if not args.no_gate:
        gate()
    if args.parts:
        for heads, tokens in ((4, (2048, 8192)), (8, (1024, 4096)), (16, (1024, 2048))):
            for blocks in (2, 1):
                slope({"H": heads}, blocks, tokens, args.ghz, found)
        for kind in args.gates:
            for blocks in (132, 100):
                with Choice(WHOLE, 2, blocks):
                    request, inputs, _ = inputs_of(Case(name="p", T=8192, H=16, gate=kind), "init")
                    t = median(alone(request, inputs, "prepare"), CudaClock())
                cycles = t * args.ghz * 1e9 * blocks / (128 * 16)
                found[f"prepare {kind} on {blocks}: cycles a unit"] = cycles
                print(f"prepare {kind} H16 T8192 on {blocks}: {1e6 * t:.1f} us, {cycles:.0f} cycles a unit")
    shapes = [(h, args.tokens) for h in args.heads] + ([(4, 131072), (32, 131072)] if args.long else [])
    for heads, T in shapes:
        for kind in args.gates if args.tokens == T else ["sigmoid"]:
            request, inputs, _ = inputs_of(Case(name="t", T=T, H=heads, gate=kind), "init")
            line = []
            for text in ["0:0:0", *(args.variants if kind == "sigmoid" else [])]:
                chunks, blocks, prepare = map(int, text.split(":"))
                with Choice(WHOLE if chunks < 0 else chunks, blocks, prepare):
                    plan = segments.plan_of(request)
                    t = median(lambda: segments.forward(request, inputs), CudaClock())
                    grids = [grid for _, _, grid in plan.launches]
                found[f"H{heads} T{T} {kind} {text}"] = t
                line.append(f"{text} {grids} {1e6 * t:.1f}")
            print(f"H{heads} T{T} {kind}: " + " | ".join(line), flush=True)
            if args.timeline and kind == "sigmoid":
                timeline(request, inputs)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def timeline(request: Request, inputs: ChunkInputs) -> None:
    """When each launch of a call begins and ends, microseconds."""
    for _ in range(3):
        segments.forward(request, inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            segments.forward(request, inputs)
        torch.cuda.synchronize()
    events = sorted(
        (e for e in profile.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start
    )
    names = len(segments.plan_of(request).launches)
    last = events[-names:]
    begin = min(e.time_range.start for e in last)
    print(
        "   ",
        [(e.name, round(e.time_range.start - begin, 1), round(e.time_range.end - begin, 1)) for e in last],
    )


if __name__ == "__main__":
    main()
