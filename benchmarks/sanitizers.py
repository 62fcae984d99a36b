"""compute-sanitizer over random calls: ``python -m benchmarks.sanitizers TOOL --backend NAME --count 150 --stages 40``.

The calls are those of ``python -m kdacore.testing.fuzz``, which explains ``--op``, ``--check`` and ``--size``:
``--count`` of whole ops, ``--many-items`` of ``chunk_kda`` on pools with null slots, whose sequences and heads are
around the numbers of clusters that run at once, and ``--stages`` of stages, where the backend has such, each cut into
``--jobs`` runs side by side. First they all run once without the tool, so that no kernel is compiled under it. Exit 1
when the tool reports something or a run ends badly; the record (``--json``) says which seeds ran and what was found.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from kdacore import machine
from kdacore.machine import commit as checkout
from kdacore.testing.random_cases import Calls, calls_of, ops_of
from kdacore.testing.random_limits import NO_LIMITS, Limits, add_limits, limits_of
from kdacore_cuda.build.kernel_source import EVERY_LANE

TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": (),
    "initcheck": (),
    "racecheck": (),
    # Kernels with many barriers overflow the tool's own table otherwise, and their launch fails.
    "synccheck": ("--num-cuda-barriers", "65536"),
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
}
"""One allocation an array, so that reading beyond it, or what was never written, is seen. JAX would else take three
quarters of the GPU's memory in each process."""
# It follows a barrier only for threads that arrive.
FOR_TOOL = {"racecheck": {EVERY_LANE: "1"}}
FOUND = 77
"""Exit status of a run in which the tool reported something."""
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
_REPORT = re.compile(r"^=+ (?:Error|Warning|Invalid|Uninitialized|Barrier|Program hit)\b.*$", re.MULTILINE)
_LINE = re.compile(r"^=+ +\S.*$", re.MULTILINE)
"""Any line of the tool's own."""

Record = dict[str, Any]


class Share(NamedTuple):
    """Random calls that one process makes."""

    calls: Calls
    seeds: range
    many: bool = False
    """Draw calls of many items only."""


def shares(seed: int, count: int, jobs: int) -> list[tuple[int, int]]:
    """First seed and number of seeds of each run, as equal as they can be; none empty."""
    each, more = divmod(count, jobs)
    sizes = [each + (i < more) for i in range(jobs)]
    return [(seed + sum(sizes[:i]), n) for i, n in enumerate(sizes) if n]


def summarise(output: str, status: int) -> Record:
    """What one run found: the number that the tool counted (None: it never got that far) and its first reports,
    or the first lines that it wrote where none of them is worded as a report."""
    counted = [int(n) for n in _SUMMARY.findall(output)]
    found = _REPORT.findall(output)
    if not found and any(counted):  # worded otherwise
        found = _LINE.findall(output)
    reports = [line.strip("= ") for line in found]
    return {"status": status, "found": max(counted) if counted else None, "reports": reports[:20]}


def is_clean(run: Record) -> bool:
    return (run["status"], run["found"]) == (0, 0)


def wanted(args: argparse.Namespace) -> list[Share]:
    """All there is to run, of each kind of op that the backend has."""
    counts: dict[Calls, int] = {"whole": args.count, "stages": args.stages}
    found = [
        Share(calls, range(args.seed, args.seed + counts[calls]))
        for calls in calls_of(args.backend)
        if counts[calls] and (not args.limits.op or args.limits.op in ops_of(args.backend, calls))
    ]
    if args.limits == NO_LIMITS and args.many_items and "chunk_kda" in ops_of(args.backend, "whole"):
        found.append(Share("whole", range(args.seed, args.seed + args.many_items), many=True))
    return found


def command(args: argparse.Namespace, share: Share, jobs: int, record: Path) -> list[str]:
    """The command that makes the calls of a share."""
    first, count = share.seeds.start, len(share.seeds)
    return [
        *(sys.executable, "-m", "kdacore.testing.fuzz", "--backend", args.backend, "--device", args.device),
        *("--calls", share.calls, "--seed", str(first), "--count", str(count)),
        *("--jobs", str(jobs), "--seconds", str(args.seconds), "--json", str(record)),
        *(Limits(op="chunk_kda", many=True) if share.many else args.limits).words(),
    ]


def run_share(args: argparse.Namespace, share: Share) -> Record:
    """One process under the tool."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "fuzz.json"
        tool = [args.command, "--tool", args.tool, "--error-exitcode", str(FOUND), *TOOLS[args.tool]]
        env = os.environ | ENVIRONMENT | FOR_TOOL.get(args.tool, {})
        words = [*tool, *command(args, share, 1, record)]
        done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
        output = done.stdout + done.stderr
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            name = f"{args.tool}-{'many' if share.many else share.calls}-{share.seeds.start}.log"
            (args.logs / name).write_text(output)
        made: Record = {"seeds": {"count": 0}, "served": 0, "failed": 0}
        if record.is_file():
            made = json.loads(record.read_text())
    counts = {"ran": made["seeds"]["count"], "served": made["served"], "failed": made["failed"]}
    calls = {"calls": share.calls, "many": share.many, "seed": share.seeds.start}
    return {**calls, **counts, **summarise(output, done.returncode)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--command", default="compute-sanitizer", help="the tool's program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="calls of whole ops (100)")
    parser.add_argument("--many-items", type=int, default=8, help="of many items (8); none with limits")
    parser.add_argument("--stages", type=int, default=40, help="calls of stages (40)")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of each run")
    parser.add_argument("--logs", type=Path, help="keep what the tool printed here")
    parser.add_argument("--json", type=Path, help="where the record goes")
    add_limits(parser)
    args = parser.parse_args(argv)
    args.limits = limits_of(parser, args)
    if not shutil.which(args.command):
        parser.error(f"{args.command} is not on the path: it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        print("once without the tool")
        env = os.environ | FOR_TOOL.get(args.tool, {})
        for share in wanted(args):
            warm = command(args, share, args.jobs, Path(folder) / "fuzz.json")
            subprocess.run(warm, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env, check=False)
    runs: list[Record] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = [
            pool.submit(run_share, args, every._replace(seeds=range(first, first + count)))
            for every in wanted(args)
            for first, count in shares(every.seeds.start, len(every.seeds), args.jobs)
        ]
        for done in as_completed(waiting):
            run = done.result()
            runs.append(run)
            found = (
                "clean" if is_clean(run) else f"found {run['found']}, exit {run['status']}: {run['reports']}"
            )
            counts = f"{run['ran']} ran, {run['served']} served"
            kind = "many items" if run["many"] else run["calls"]
            print(f"{len(runs)}/{len(waiting)}  {kind}, seeds from {run['seed']}: {counts}; {found}")
    runs.sort(key=lambda run: (run["calls"], run["many"], run["seed"]))
    if args.json:
        record = {"schema": 1, "tool": args.tool, "backend": args.backend, "commit": checkout()}
        record["limits"] = args.limits.described()
        record["machine"] = {row.name: row.value for row in machine.probe().rows}
        args.json.write_text(json.dumps(record | {"runs": runs}, indent=1) + "\n")
    return 0 if all(is_clean(run) for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
