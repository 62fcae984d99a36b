"""``kdacore tune costs``: measure how long each backend takes on this device, for automatic choice."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kdacore import files, report
from kdacore.bench.cases import Case
from kdacore.bench.clock import Budget, CudaClock, clock_for
from kdacore.cli.tune_device import complain, default_device, device_of, name_of, torch_name
from kdacore.dispatch import cost_tables
from kdacore.lazy import install_line
from kdacore.machine import cpu_name
from kdacore.progress import Bar
from kdacore.types import Device

if TYPE_CHECKING:
    from kdacore.bench import cost_measure

MINUTES = 4.8
SAMPLES, SECONDS, CPU_SECONDS = 7, 1.0, 0.4
"""Timings of each backend, and seconds that one call may take, on a CPU fewer."""


def run(args: argparse.Namespace) -> int:
    from kdacore.bench import cost_shapes

    where = args.device or default_device()
    cases = [case for case in cost_shapes.cases(where.partition(":")[0]) if args.only in case.name]
    if not cases:
        return complain("no call is left to measure (--only)", report.USAGE)
    if args.list:
        out = report.console()
        out.print(report.table(("call",), [(case.name,) for case in cases], out))
        return report.OK
    if where == "cpu":
        here = Device("cpu", 0, "")
        return _measure(args, cases, here, cpu_name(), where, lambda case: clock_for(case.kind, where))
    if importlib.util.find_spec("torch") is None:
        return complain(f"needs torch, which is not installed: {install_line('cuda')}", report.BROKEN)
    device = device_of(where)
    if device is None:
        why = f"no NVIDIA GPU that torch can use as {where!r}; --list shows what would be measured"
        return complain(why, report.BROKEN)
    return _measure(args, cases, device, name_of(device), torch_name(device), lambda case: CudaClock())


def _measure(
    args: argparse.Namespace,
    cases: list[Case],
    device: Device,
    name: str,
    where: str,
    clock: Callable[[Case], cost_measure.Sample],
) -> int:
    """Measure and write the table of a device. ``name``: its own for itself; ``where``: that of the array libraries."""
    from kdacore.bench import cost_measure

    path = args.out or cost_tables.path_of(device.arch, name)
    partial = path.with_name(path.stem + cost_tables.PARTIAL)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    measured = cost_measure.Measured(partial, device, name)
    out = report.console()
    if not args.fresh and measured.load():
        out.print(f"going on from {partial}: {len(measured.seconds)} calls are measured")
    budget = Budget(args.samples or SAMPLES, args.seconds or (SECONDS if device.arch else CPU_SECONDS))
    limit = 60 * (args.minutes or MINUTES)
    with Bar("tune", len(cases), done=_done(measured, cases)) as bar:
        for case in cost_measure.measure(measured, cases, where, budget, clock, limit):
            bar.begin(case.name, done=_done(measured, cases))
    if measured.disagreements:
        for said in measured.disagreements:
            complain(said, report.BROKEN)
        why = "nothing is written where backends disagree; `kdacore verify` says which is wrong"
        return complain(why, report.BROKEN)
    missing = len(cases) - _done(measured, cases)
    if missing:
        why = f"{missing} of {len(cases)} calls are still to be measured; run it again to go on"
        return complain(why, report.BROKEN)
    return _write(path, partial, measured.table(cases))


def _done(measured: cost_measure.Measured, cases: list[Case]) -> int:
    return sum(case.name in measured.seconds for case in cases)


def _write(path: Path, partial: Path, table: cost_tables.Table) -> int:
    files.write_whole(path, cost_tables.dump(table))
    partial.unlink(missing_ok=True)
    cost_tables.forget()
    report.console().print(f"written: {path}")
    return report.OK
