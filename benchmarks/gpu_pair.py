"""GPU time of two checkouts, interleaved: what a change of the kernels or their launches costs or saves.

    python -m benchmarks.gpu_pair BEFORE AFTER [--backends cuda triton] [--only TEXT] [--processes 3] [--rounds 3]
        [--json out.json]

``BEFORE`` and ``AFTER`` are folders of kdacore checkouts. Each gets a process of its own; for every case the two
take samples alternately, while the other waits. A sample is a replay of a CUDA graph that holds the public call
several times, so it has no host time. Where a process has its code and its arrays in device memory moves a call's time
by up to 2 %, so all is done again in further pairs of processes. Before a case is timed, each side holds a short call
of the same options against the reference backend in float32. Reported: the median over processes and rounds of each
side, the median of the paired ratios with the range of the processes' medians, whether outputs have the same bits, and
the SM clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdacore.bench.cases import PRESETS, Case

ERROR_BOUND = 1.8e-2
"""Of outputs and gradients in 16-bit against the reference in float32: twice the contract's bound on gradients."""
SECONDS_OF_A_SAMPLE = 3e-3
FEW_HEADS = (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64)


def cases() -> list[Case]:
    """Forward by heads with both gates, the rest of ``h200-heads``, short sequences, all training, decode."""
    forward = [Case(name=f"forward B1 T8192 H{H}", H=H) for H in FEW_HEADS]
    unbounded = [
        Case(name=f"forward B1 T8192 H{H} unbounded", H=H, gate="softplus") for H in (8, 16, 24, 32, 64)
    ]
    others = [
        dataclasses.replace(case, name=f"{case.phase} {case.name.removeprefix('decode ')}")
        for preset in ("h200-heads", "h200-forward", "h200-training", "h200-decode")
        for case in PRESETS[preset]
        if case.phase in ("forward", "training", "decode")
    ]
    named = {case.name: case for case in (*others, *forward, *unbounded)}
    return [dataclasses.replace(case, gate_sets=("init",), goals={}) for case in named.values()]


# The worker: runs with one checkout on its path.


def _call(case: Case, backend: str, x: dict[str, Any], weight: Any) -> Callable[[], tuple[Any, ...]]:
    """The public call; with gradients of ``o`` weighted by ``weight`` where the case trains."""
    import torch

    import kdacore
    from kdacore.bench.arrays import options

    op = getattr(kdacore, case.op)
    given = options(case)
    if not case.trains:
        return lambda: op(**x, **given, backend=backend)
    leaves = {n: a.requires_grad_() for n, a in x.items() if a.is_floating_point()}

    def train() -> tuple[Any, ...]:
        o = op(**{**x, **leaves}, **given, backend=backend)[0]
        return (o.detach(), *torch.autograd.grad(o, list(leaves.values()), weight))

    return train


def _relative(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def _hold(case: Case, backend: str) -> None:
    """Raises ValueError where a short call of the same options is further from the reference than the bound."""
    import torch

    from kdacore.bench.arrays import make, output_gradient

    heads = min(case.H, 2)
    short = dataclasses.replace(
        case, B=1, T=min(case.T, 200), H=heads, HV=heads * (case.value_heads // case.H), lengths=()
    )
    with torch.set_grad_enabled(case.trains):
        x = make(short, "init", "cuda")
        weight = output_gradient(short, x)
        exact = {n: a.detach().cpu().float() if a.is_floating_point() else a.cpu() for n, a in x.items()}
        want = _call(short, "reference", exact, weight.cpu().float())()
        got = _call(short, backend, x, weight)()
    for a, b in zip(got, want, strict=True):
        if a is not None and not (error := _relative(a.cpu(), b)) < ERROR_BOUND:
            raise ValueError(f"{case.name}, {backend}: error {error:.2e} against the reference")


def _digest(results: tuple[Any, ...]) -> str:
    import torch

    found = hashlib.sha256()
    for x in results:
        if x is not None:
            found.update(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def _prepare(case: Case, backend: str, held: bool) -> tuple[Callable[[], float], str]:
    """What takes one sample, in seconds of one call, and a digest of the results. ``held``: against the reference,
    before."""
    import torch

    from kdacore.bench.arrays import make, output_gradient

    if held:
        _hold(case, backend)
    with torch.set_grad_enabled(case.trains):
        x = make(case, "init", "cuda")
        call = _call(case, backend, x, output_gradient(case, x))
        digest = _digest(call())
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            count = max(1, min(64, int(SECONDS_OF_A_SAMPLE * 1e3 / max(start.elapsed_time(stop), 1e-2))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()

    def sample() -> float:
        graph.replay()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / count

    return sample, digest


def work() -> None:
    """Answer requests, a line of JSON each: ``{"case": …, "backend": …, "held": true}`` prepares, ``{}`` takes a
    sample. ``held``: against the reference too."""
    import torch

    sample: Callable[[], float] | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked:
                sample = None
                torch.cuda.empty_cache()
                sample, digest = _prepare(_case(asked["case"]), asked["backend"], asked["held"])
                answer: dict[str, Any] = {"digest": digest}
            elif sample is None:
                answer = {"error": "nothing is prepared"}
            else:
                answer = {"seconds": sample()}
        except (ValueError, RuntimeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), flush=True)


def _case(fields: dict[str, Any]) -> Case:
    known = {f.name for f in dataclasses.fields(Case)}
    lists = {n: tuple(x) if isinstance(x, list) else x for n, x in fields.items() if n in known}
    return Case(**lists)  # type: ignore[arg-type]  # what the driver's own Case was


# The driver.


class Worker:
    """A process with one checkout."""

    def __init__(self, checkout: Path) -> None:
        folders = [checkout, *(checkout / "backends" / n for n in ("reference", "triton", "cuda", "pallas"))]
        path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker"],
            env={**os.environ, "PYTHONPATH": path},
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request; RuntimeError where the process is gone or says that it failed."""
        to, answers = self._process.stdin, self._process.stdout
        if to is None or answers is None:
            raise RuntimeError("the worker has no pipes")
        to.write(json.dumps(request) + "\n")
        to.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError(f"the worker ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def sm_clock() -> int | None:
    """MHz, or None where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError:
        return None
    words = told.stdout.split()
    return int(words[0]) if words and words[0].isdigit() else None


Seconds = dict[str, list[float]]
"""Samples of each side."""


def measure(
    case: Case, backend: str, sides: dict[str, Worker], rounds: int, held: bool
) -> tuple[Seconds, bool]:
    """Samples of one pair of processes, and whether results have the same bits."""
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(Case) if f.name != "goals"}
    request = {"case": fields, "backend": backend, "held": held}
    digests = {name: side.ask(request)["digest"] for name, side in sides.items()}
    seconds: Seconds = {name: [] for name in sides}
    for turn in range(rounds):
        for name in list(sides) if turn % 2 else list(sides)[::-1]:
            seconds[name].append(sides[name].ask({})["seconds"])
    return seconds, digests["before"] == digests["after"]


def row_of(case: Case, backend: str, measured: list[tuple[Seconds, bool]]) -> dict[str, Any]:
    """The record of one case."""
    seconds = {name: [x for one, _ in measured for x in one[name]] for name in measured[0][0]}
    ratios = [[b / a for a, b in zip(one["before"], one["after"], strict=True)] for one, _ in measured]
    of_processes = [statistics.median(one) for one in ratios]
    return {
        "case": case.name,
        "backend": backend,
        "before_us": statistics.median(seconds["before"]) * 1e6,
        "after_us": statistics.median(seconds["after"]) * 1e6,
        "ratio": statistics.median(of_processes),
        "ratio_range": [min(of_processes), max(of_processes)],
        "same_bits": all(same for _, same in measured),
        "sm_clock_mhz": sm_clock(),
        "samples": [one for one, _ in measured],
    }


def _device() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("gpu_pair: there is no CUDA device")
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}


def main() -> int:
    """Measure, print the table, write the record."""
    if "--worker" in sys.argv:
        work()
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--backends", nargs="+", default=["cuda"])
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose name contains one of these")
    parser.add_argument("--processes", type=int, default=3, help="pairs of them, one after the other")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "what": "benchmarks.gpu_pair",
        **_device(),
        "python": platform.python_version(),
        "processes": args.processes,
        "rounds": args.rounds,
    }
    wanted = [
        (case, backend)
        for backend in args.backends
        for case in cases()
        if any(text in case.name for text in args.only)
    ]
    measured: list[list[tuple[Seconds, bool]]] = [[] for _ in wanted]
    failed: dict[int, str] = {}
    for process in range(args.processes):
        sides = {"before": Worker(args.before.resolve()), "after": Worker(args.after.resolve())}
        for i, (case, backend) in enumerate(wanted):
            if i in failed:
                continue
            try:
                measured[i].append(measure(case, backend, sides, args.rounds, held=process == 0))
            except RuntimeError as error:
                failed[i] = str(error)
                print(f"{backend:6} {case.name:42} FAILED: {error}", flush=True)
                continue
            row = row_of(case, backend, measured[i])
            low, high = row["ratio_range"]
            bits = "same bits" if row["same_bits"] else "other bits"
            times = f"{row['before_us']:9.1f} {row['after_us']:9.1f} us  {row['ratio']:.4f}"
            print(f"{backend:6} {case.name:42} {times} ({low:.3f} to {high:.3f})  {bits}", flush=True)
        for side in sides.values():
            side.close()
        if args.json:
            record["pairs"] = [
                {"case": case.name, "backend": backend, "error": failed[i]}
                if i in failed
                else row_of(case, backend, measured[i])
                for i, (case, backend) in enumerate(wanted)
            ]
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
