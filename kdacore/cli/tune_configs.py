"""``kdacore tune configs``: find the fastest launch configurations of the Triton kernels on this GPU."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from kdacore import files, report
from kdacore.bench.clock import Budget
from kdacore.cli.tune_device import complain, device_of, progress_bar
from kdacore.types import Device

OPS = ("fused_recurrent_kda", "chunk_kda", "kda_chunk_intra")
_DEFAULT_ARCH = "sm_90"
SAMPLES, SECONDS = 15, 5.0
"""Timings of each configuration, and seconds that one comparison may take."""


def run(args: argparse.Namespace) -> int:
    if args.arch and not args.list:
        return complain("--arch is for --list: what is measured is the GPU that is here", report.USAGE)
    for module in ("torch", "kdacore_triton", *(() if args.list else ("triton",))):
        if importlib.util.find_spec(module) is None:
            why = f"needs {module}, which is not installed: pip install 'kdacore[triton]'"
            return complain(why, report.BROKEN)
    from kdacore_triton import tune_jobs

    out = report.console()
    device = device_of(args.device)
    arch = args.arch or (device.arch if device else _DEFAULT_ARCH)
    jobs = [j for j in tune_jobs.jobs(arch, tuple(args.op)) if args.only in j.name]
    if not jobs:
        return complain("no rule is left to tune (--op, --only)", report.USAGE)
    if args.list:
        rows = [(job.name, _words(job.sizes), _words(job.config)) for job in jobs]
        out.print(report.table(("rule", "measured at", f"shipped for {arch}"), rows))
        return report.OK
    if device is None:
        why = (
            f"no NVIDIA GPU that torch can use as {args.device!r}; --list shows what would be tuned anywhere"
        )
        return complain(why, report.BROKEN)
    return _tune(args, jobs, device, out)


def _tune(args: argparse.Namespace, jobs: list[Any], device: Device, out: Console) -> int:
    from kdacore_triton import tune

    outcomes = []
    with progress_bar() as progress:
        task = progress.add_task("tune", total=len(jobs))
        for job in jobs:
            told = lambda what: progress.update(task, description=what)  # noqa: E731
            outcomes.append(
                tune.tune(job, device, Budget(args.samples or SAMPLES, args.seconds or SECONDS), told)
            )
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
        files.write_named(args.json, json.dumps(_document(device, outcomes), indent=1) + "\n")
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


def _words(given: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in given.items())
