"""``kdacore tune configs``: find the fastest launch configurations of backends' kernels on this GPU."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from kdacore import config, files, registry, report
from kdacore.bench.clock import Budget
from kdacore.cli.tune_device import complain, device_of
from kdacore.command_types import ConfigTuner, TuningJob
from kdacore.progress import Bar
from kdacore.registry import REGISTRY
from kdacore.types import Device

_DEFAULT_ARCH = "sm_90"
SAMPLES, SECONDS = 15, 5.0
"""Timings of each configuration, and seconds that one comparison may take."""


def run(args: argparse.Namespace) -> int:
    if args.arch and not args.list:
        return complain("--arch is for --list: what is measured is the GPU that is here", report.USAGE)
    tuners = REGISTRY.listed("kdacore_config_tuners", ConfigTuner)
    if not args.list and (why := _missing(tuners)):
        return complain(why, report.BROKEN)
    where = args.device or "cuda"
    device = device_of(where) if importlib.util.find_spec("torch") else None
    arch = config.device_arch(args.arch or "") or (device.arch if device else _DEFAULT_ARCH)
    jobs = {t.backend: [j for j in t.jobs(arch, tuple(args.op)) if args.only in j.name] for t in tuners}
    tuners = [tuner for tuner in tuners if jobs[tuner.backend]]
    if not tuners:
        return complain("no rule is left to tune (--op, --only)", report.USAGE)
    if args.list:
        _list(arch, [job for tuner in tuners for job in jobs[tuner.backend]])
        return report.OK
    if device is None:
        why = f"no NVIDIA GPU that torch can use as {where!r}; --list shows what would be tuned anywhere"
        return complain(why, report.BROKEN)
    if len(tuners) > 1:
        names = ", ".join(tuner.backend for tuner in tuners)
        return complain(f"--op, --only: one backend a run, not {names}: each has its own file", report.USAGE)
    return _tune(args, tuners[0], jobs[tuners[0].backend], device)


def _missing(tuners: list[ConfigTuner]) -> str:
    """What the software of this machine lacks for tuning; empty when nothing."""
    for tuner in tuners:
        for _, what, remedy in registry.missing(REGISTRY.get(tuner.backend).backend, hardware=False):
            return f"{tuner.backend}: {what}: {remedy}"
    return ""


def _list(arch: str, jobs: list[TuningJob]) -> None:
    out = report.console()
    out.print(f"rules, what each is measured at, and what is shipped for {arch}:")
    for job in jobs:
        out.print(report.hanging("  ", job.name, out))
        out.print(report.hanging("      measured at ", _words(job.sizes), out))
        out.print(report.hanging("      shipped     ", _words(job.config), out))


def _tune(args: argparse.Namespace, tuner: ConfigTuner, jobs: list[TuningJob], device: Device) -> int:
    from kdacore.bench import config_search

    out, outcomes = report.console(), []
    budget = Budget(args.samples or SAMPLES, args.seconds or SECONDS)
    with Bar("tune", len(jobs)) as bar:
        for job in jobs:
            outcomes.append(config_search.tune(job, device, budget, bar.begin))
            bar.advance()
    _show(out, outcomes)
    path = args.out or Path(f"{device.arch}.json")
    tuner.write(path, device.arch, [(t.job, t.config) for t in outcomes])
    out.print(f"written: {path}")
    if args.json:
        files.write_named(args.json, json.dumps(_document(device, outcomes), indent=1) + "\n")
    return report.OK if all(t.best for t in outcomes) else report.BROKEN


def _show(out: Console, outcomes: list[Any]) -> None:
    rows = [
        (
            t.job.name,
            f"{t.best.seconds * 1e3:.4f} ms" if t.best and t.best.seconds else "wrong",
            f"{t.gain:.2f}x",
            _words(t.config),
        )
        for t in outcomes
    ]
    out.print(report.table(("rule", "time", "over shipped", "configuration"), rows, out))


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
