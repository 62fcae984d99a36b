"""Many random calls of one backend, judged by the contract's bounds, with a record of them.

::

    python -m kdacore.testing.fuzz --backend NAME [--device cpu|cuda|tpu] [--count 2000] [--seed 0]
           [--calls whole|stages] [--jobs N] [--level quick|full] [--seconds S] [--json FILE]
           [--op OP] [--check accuracy|gradients [--size NAME=LOW..HIGH ...]]

Each seed stands for one call (:func:`kdacore.testing.random_cases.random_case`) of a whole op or, with
``--calls stages``, of a stage of the chunk pipeline; so a failing one is run again by ``--seed ITS_SEED --count 1``
and the same limits. ``--size`` reaches kernels that serve certain sizes only, as in ``--size HV=24 T=1024..2100``.
Calls that the backend's verifiers decline are counted, not failed. With more than one job each runs in a process of
its own; a call that kills its process, or breaks the device for it, fails alone. With a time limit the record names
the seeds that ran: the first ones, none left out between.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kdacore import machine, streams
from kdacore.argument_types import at_least, positive
from kdacore.errors import ContractError
from kdacore.files import writable, write_named
from kdacore.progress import Bar
from kdacore.registry import REGISTRY
from kdacore.testing import processes
from kdacore.testing.capabilities import default_device
from kdacore.testing.cases import Case
from kdacore.testing.matrix import LEVELS, Level
from kdacore.testing.processes import Work
from kdacore.testing.random_cases import (
    CALLS,
    NAMES,
    Calls,
    NothingServedError,
    calls_of,
    ops_of,
    random_case,
)
from kdacore.testing.random_edges import traits
from kdacore.testing.random_limits import NO_LIMITS, Limits, add_limits, limits_of
from kdacore.testing.suite import Result, run_case

SCHEMA = 1
_SHOWN = 20
"""Failures that the terminal shows in full."""

Row = dict[str, Any]
"""One call as it is recorded: seed, id, op, check, status, seconds, the edges of the contract that it reaches
(``traits``), and what was measured or went wrong."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What every process needs to know."""

    backend: str
    device: str
    level: Level
    calls: Calls = "whole"
    limits: Limits = NO_LIMITS

    def case(self, seed: int) -> Case:
        return random_case(self.backend, seed, self.device, self.level, self.calls, limits=self.limits)


def run_seed(task: Task, seed: int) -> Row:
    """Draw the call of one seed, run it, describe what happened."""
    return describe(run_case(task.case(seed)))


def describe(result: Result) -> Row:
    """A result as plain data."""
    case = result.case
    row: Row = {
        "seed": case.seed,
        "id": case.id,
        "op": case.op,
        "check": case.check,
        "status": result.status,
        "seconds": round(result.seconds, 3),
        "traits": list(traits(case)),
    }
    if result.codes:
        row["codes"] = list(result.codes)
    if (worst := result.worst) is not None:
        row |= {"what": worst.what, "error": _finite(worst.error), "bound": worst.bound}
    if result.status == "failed":
        row |= {"message": result.message, "case": dataclasses.asdict(case)}
    return row


def fuzz(
    task: Task,
    seeds: range,
    jobs: int = 1,
    on_row: Callable[[Row], None] = lambda row: None,
    seconds: float = math.inf,
) -> list[Row]:
    """Run the calls of ``seeds``; rows come back sorted by seed.

    Args:
        task: which backend, where, how long sequences, of which ops.
        seeds: one call each.
        jobs: processes; 1 runs everything in this one.
        on_row: called with each row as it is there.
        seconds: no call begins later than this; those begun are finished.
    """
    rows = []
    given = _until(seeds, time.monotonic() + seconds)
    some = min(jobs, len(seeds))
    if jobs <= 1:
        found: Iterator[Row] = (run_seed(task, seed) for seed in given)
    else:
        work = Work(partial(run_seed, task), _has_failed, partial(_lost, task))
        found = processes.run(work, given, some)
    for row in found:
        rows.append(row)
        on_row(row)
    return sorted(rows, key=lambda row: row["seed"])


def _until(seeds: range, end: float) -> Iterator[int]:
    """The seeds in order, as long as there is time."""
    return itertools.takewhile(lambda _: time.monotonic() < end, seeds)


def _has_failed(row: Row) -> bool:
    return bool(row["status"] == "failed")


def _lost(task: Task, seed: int, text: str) -> Row:
    """The row of a seed whose process ended."""
    return describe(Result(task.case(seed), "failed", message=text))


# --- the record -----------------------------------------------------------------------------------------------------


def document(task: Task, seeds: range, rows: list[Row], seconds: float, commit: str) -> dict[str, Any]:
    """Everything needed to judge the run later and to repeat any call of it."""
    status = Counter(row["status"] for row in rows)
    codes = Counter(code for row in rows if row["status"] == "declined" for code in row.get("codes", ()))
    return {
        "schema": SCHEMA,
        "what": "random calls against the float64 oracle; each seed is one call",
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "commit": commit,
        "machine": {row.name: row.value for row in machine.probe().rows},
        "versions": {row.name: row.value for row in machine.versions()},
        "backend": task.backend,
        "device": task.device,
        "level": task.level,
        "calls": task.calls,
        "limits": task.limits.described(),
        "seeds": {"first": seeds.start, "count": len(rows)},
        "served": status["served"],
        "declined": status["declined"],
        "failed": status["failed"],
        "declined_for": dict(sorted(codes.items())),
        "served_by_op": dict(Counter(row["op"] for row in rows if row["status"] == "served")),
        "drawn": dict(sorted(Counter(trait for row in rows for trait in row["traits"]).items())),
        "worst": worst(rows),
        "failures": [row for row in rows if row["status"] == "failed"],
    }


def worst(rows: list[Row]) -> dict[str, Row]:
    """The call that came nearest its bound (or went farthest beyond), for each measured quantity."""
    found: dict[str, Row] = {}
    for row in rows:
        if row.get("bound") and row["error"] is not None:
            ratio = row["error"] / row["bound"]
            if ratio > found.get(row["what"], {"ratio": -1.0})["ratio"]:
                found[row["what"]] = {
                    "ratio": round(ratio, 3), "error": row["error"], "bound": row["bound"],
                    "seed": row["seed"], "id": row["id"],
                }  # fmt: skip
    return dict(sorted(found.items()))


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


# --- the command ----------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> int:
    """``python -m kdacore.testing.fuzz``. Returns 0 when nothing failed, 1 otherwise, also where it cannot be written
    what came of it, and 2 where the command makes no sense."""
    status = 1
    try:
        with streams.for_readers():
            status = _run(words)
    except OSError as error:  # a full disk, say
        if sys.stderr is not None:  # which the shell may have closed
            print(f"{_parser().prog}: {error}", file=sys.stderr)
        status = status or 1
    return status


def _run(words: list[str] | None) -> int:
    parser = _parser()
    asked = parser.parse_args(words)
    limits = limits_of(parser, asked)
    if asked.calls == "stages" and limits.check == "gradients":
        parser.error("argument --check: stages have no gradients")
    try:
        REGISTRY.get(asked.backend)
    except ContractError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.calls not in calls_of(asked.backend):
        print(f"--calls: backend {asked.backend!r} has no {NAMES[asked.calls]}", file=sys.stderr)
        return 2
    if asked.op and asked.op not in ops_of(asked.backend, asked.calls):
        print(
            f"--op: backend {asked.backend!r} has no {asked.op!r} among its {NAMES[asked.calls]}",
            file=sys.stderr,
        )
        return 2
    task = Task(
        asked.backend, asked.device or default_device(asked.backend), asked.level, asked.calls, limits
    )
    try:
        task.case(asked.seed)
    except NothingServedError as error:
        print(error, file=sys.stderr)
        return 2
    seeds = range(asked.seed, asked.seed + asked.count)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes started from here
    start = time.perf_counter()
    with _bar(task, len(seeds)) as show:
        rows = fuzz(task, seeds, asked.jobs, show, asked.seconds)
    found = document(task, seeds, rows, time.perf_counter() - start, asked.commit or machine.commit())
    print(f"{found['served']} served, {found['declined']} declined, {found['failed']} failed")
    for row in found["failures"][:_SHOWN]:
        print(f"seed {row['seed']} FAILED {row['id']}: {row['message'].strip().splitlines()[-1]}")
    if asked.json:  # last: the disk may be full by now
        write_named(asked.json, json.dumps(found, indent=1) + "\n")
    return 1 if found["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kdacore.testing.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--backend", required=True, metavar="NAME", help="the backend to call")
    parser.add_argument("--device", choices=("cpu", "cuda", "tpu"), help="where (default: its first choice)")
    parser.add_argument("--count", type=at_least(1), default=2000, metavar="N", help="how many calls (2000)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="S", help="seed of the first (0)")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="processes (1)")
    parser.add_argument(
        "--calls", choices=CALLS, default="whole", help="of whole ops (the default) or of the stages"
    )
    add_limits(parser)
    parser.add_argument(
        "--level", choices=LEVELS, default="quick", help="full draws longer sequences (quick)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=math.inf, metavar="S", help="begin no call after this"
    )
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the record here")
    parser.add_argument("--commit", default="", help="what the record calls this version (git's HEAD)")
    return parser


@contextlib.contextmanager
def _bar(task: Task, total: int) -> Iterator[Callable[[Row], None]]:
    """A progress bar that says how many calls were declined and failed, and names failing seeds at once."""
    status: Counter[str] = Counter()
    with Bar(f"fuzz {task.backend}", total, transient=False) as bar:

        def show(row: Row) -> None:
            status[row["status"]] += 1
            bar.advance(f"{status['declined']} declined, {status['failed']} failed")
            if row["status"] == "failed":
                bar.print(f"seed {row['seed']} FAILED")

        yield show


if __name__ == "__main__":
    sys.exit(main())
