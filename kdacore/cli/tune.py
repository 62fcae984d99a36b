"""``kdacore tune``: find the fastest launch configurations of the Triton kernels on this GPU, and write them down."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kdacore import report
from kdacore.bench.clock import Budget
from kdacore.device import torch_device
from kdacore.files import writable
from kdacore.types import Device

_OPS = ("fused_recurrent_kda", "chunk_kda", "kda_chunk_intra")
_DEFAULT_ARCH = "sm_90"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", action="append", default=[], choices=_OPS, help="only this op (again for more; default all)")
    add("--only", default="", metavar="TEXT", help="only rules whose name, as in --list, contains this")
    add("--list", action="store_true", help="list what would be tuned; needs no GPU")
    add("--arch", default=None, help="for --list: an architecture, as sm_90 (default: the GPU's, else sm_90)")
    add("--device", default="cuda", help="cuda, cuda:1 (default cuda)")
    add(
        "--out",
        type=writable,
        metavar="PATH",
        help="the data file to write (default ARCH.json in this folder)",
    )
    add("--json", type=writable, metavar="PATH", help="write every measurement there")
    add("--samples", type=int, default=15, help="timings of each configuration (default 15)")
    add("--seconds", type=float, default=5.0, help="at most this long on one comparison (default 5)")


def run(args: argparse.Namespace) -> int:
    if args.samples < 1 or args.seconds <= 0:
        return _no("--samples and --seconds must be positive", report.USAGE)
    if args.arch and not args.list:
        return _no("--arch is for --list: what is measured is the GPU that is here", report.USAGE)
    for module in ("torch", "kdacore_triton", *(() if args.list else ("triton",))):
        if importlib.util.find_spec(module) is None:
            return _no(
                f"needs {module}, which is not installed: pip install 'kdacore[triton]'", report.BROKEN
            )
    from kdacore_triton import tune_jobs

    out = report.console()
    device = _device(args.device)
    arch = args.arch or (device.arch if device else _DEFAULT_ARCH)
    jobs = [j for j in tune_jobs.jobs(arch, tuple(args.op)) if args.only in j.name]
    if not jobs:
        return _no("no rule is left to tune (--op, --only)", report.USAGE)
    if args.list:
        rows = [(job.name, _words(job.sizes), _words(job.config)) for job in jobs]
        out.print(report.table(("rule", "measured at", f"shipped for {arch}"), rows))
        return report.OK
    if device is None:
        why = (
            f"no NVIDIA GPU that torch can use as {args.device!r}; --list shows what would be tuned anywhere"
        )
        return _no(why, report.BROKEN)
    return _tune(args, jobs, device, out)


def _no(why: str, status: int) -> int:
    print(f"kdacore tune: {why}", file=sys.stderr)
    return status


def _tune(args: argparse.Namespace, jobs: list[Any], device: Device, out: Console) -> int:
    from kdacore_triton import tune

    outcomes = []
    with _progress() as progress:
        task = progress.add_task("tune", total=len(jobs))
        for job in jobs:
            told = lambda what: progress.update(task, description=what)  # noqa: E731
            outcomes.append(tune.tune(job, device, Budget(args.samples, args.seconds), told))
            progress.advance(task)
    rows = [
        (
            t.job.name,
            f"{t.best.seconds * 1e3:.4f} ms" if t.best and t.best.seconds else "wrong",
            f"{t.gain:.2f}x",
            _words(t.config),
        )
        for t in outcomes
    ]
    out.print(report.table(("rule", "time", "over shipped", "configuration"), rows))
    path = args.out or Path(f"{device.arch}.json")
    tune.write(path, tune.data_file(device.arch, outcomes))
    out.print(f"written: {path}")
    if args.json:
        args.json.write_text(json.dumps(_document(device, outcomes), indent=1) + "\n", encoding="utf-8")
    return report.OK if all(t.best for t in outcomes) else report.BROKEN


def _document(device: Device, outcomes: list[Any]) -> dict[str, Any]:
    """Every measurement, with what it was made on."""
    from kdacore import machine

    return {
        "arch": device.arch,
        "machine": {row.name: row.value for row in machine.probe().rows},
        "versions": {row.name: row.value for row in machine.versions()},
        "rules": [
            {
                "op": t.job.op,
                "when": dict(t.job.when),
                "sizes": t.job.sizes,
                "shipped": dict(t.job.config),
                "chosen": t.config,
                "trials": [dataclasses.asdict(trial) for trial in t.trials],
            }
            for t in outcomes
        ],
    }


def _device(name: str) -> Device | None:
    """The GPU as requests name it; None without one."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None or not name.startswith("cuda"):
        return None
    index = torch.device(name).index
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        return None
    return torch_device("cuda", index)


def _words(given: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in given.items())


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
