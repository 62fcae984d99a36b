"""The ``import`` preset: how long ``import kdacore`` takes in a fresh process."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from kdacore import machine
from kdacore.bench.clock import summary
from kdacore.bench.results import Figure, Results, Row

LIMIT = 0.1
"""Seconds."""
PROCESSES = 15
_CODE = """
import time
start = time.perf_counter()
import kdacore
print(time.perf_counter() - start)
"""


def run_preset(processes: int = PROCESSES) -> Results:
    """Import in that many processes, one after the other, once before to compile, as an installer does, and to fill
    the file cache."""
    with tempfile.TemporaryDirectory() as bytecode:
        _once(bytecode)
        timing = summary([_once(bytecode) for _ in range(processes)])
    row = Row(
        preset="import",
        case="import kdacore",
        phase="import",
        contender="kdacore",
        status="ok",
        seconds=timing.median,
        low=timing.low,
        high=timing.high,
        samples=timing.samples,
    )
    met = timing.median <= LIMIT
    figure = Figure(
        preset="import",
        name="import kdacore",
        value=timing.median * 1e3,
        unit="ms",
        want="<= 100 ms",
        met=met,
    )
    return Results([row], [figure])


def _once(bytecode: str) -> float:
    env = machine.child_environment(PYTHONPYCACHEPREFIX=bytecode)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", f"{machine.ENTRY}\n{_CODE}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return float(done.stdout)
