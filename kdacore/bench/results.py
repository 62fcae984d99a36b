"""Benchmark results: rows, figures held against what was asked for, and the JSON they are kept in."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kdacore import files, machine, report

SCHEMA = 1
"""Version of the results' layout; raised when a field changes its meaning or goes away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement, or the reason there is none."""

    preset: str
    case: str
    phase: str
    contender: str
    status: str
    """``ok``; ``skipped``: could not be timed here; ``wrong``: failed the correctness gate; ``FAILED``: raised."""
    backend: str = ""
    """What really ran."""
    form: str = ""
    """In which form, with the numbers that decided (:attr:`kdacore.types.Candidate.form`)."""
    auto: bool = False
    """Auto dispatch would choose it."""
    gates: str = ""
    shape: str = ""
    dtype: str = ""
    device: str = ""
    seconds: float | None = None
    """Median of one call."""
    low: float | None = None
    high: float | None = None
    samples: int = 0
    peak_bytes: int | None = None
    """Peak memory of one call beyond its inputs."""
    input_bytes: int | None = None
    error: float | None = None
    """Relative error against the oracle, of the worst result relative to its bound."""
    bound: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that something was promised of. ``met`` is None where nothing was."""

    preset: str
    name: str
    value: float
    unit: str
    want: str
    met: bool | None
    note: str = ""


@dataclass
class Results:
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    def add(self, other: Results) -> None:
        self.rows += other.rows
        self.figures += other.figures

    @property
    def failed(self) -> bool:
        return any(row.status in ("wrong", "FAILED") for row in self.rows)

    @property
    def missed(self) -> list[Figure]:
        return [f for f in self.figures if f.met is False]


def document(
    results: Results, presets: list[str], load_before: tuple[float, ...], complete: bool = True
) -> dict[str, Any]:
    """Everything needed to read the numbers later. Not ``complete``: the run was interrupted."""
    where = machine.probe()
    return {
        "schema": SCHEMA,
        "presets": presets,
        "complete": complete,
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": machine.commit(),
        "machine": {row.name: row.value for row in where.rows},
        "versions": {row.name: row.value for row in machine.versions()},
        "scheduling": scheduling(),
        "load_average": {"before": list(load_before), "after": list(load())},
        "rows": [dataclasses.asdict(row) for row in results.rows],
        "figures": [dataclasses.asdict(figure) for figure in results.figures],
    }


def write(path: Path, contents: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_named(path, json.dumps(contents, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """A results file. ValueError when it is not one this version understands."""
    contents: dict[str, Any] = json.loads(path.read_text())
    if contents.get("schema") != SCHEMA:
        raise ValueError(f"{path}: results schema {contents.get('schema')!r}; wanted {SCHEMA}")
    return contents


def load() -> tuple[float, ...]:
    """The load averages: other work on the machine shows here."""
    return tuple(round(x, 2) for x in os.getloadavg()) if hasattr(os, "getloadavg") else ()


def scheduling() -> str:
    """The priority the benchmark ran with, where the system says: a busy machine may have been kept out."""
    if not hasattr(os, "sched_getscheduler"):
        return ""
    policies = {getattr(os, name): name for name in ("SCHED_OTHER", "SCHED_BATCH", "SCHED_FIFO", "SCHED_RR")}
    policy = policies.get(os.sched_getscheduler(0), "another policy")
    return f"{policy}, nice {os.getpriority(os.PRIO_PROCESS, 0)}"


# --- as text ------------------------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """``1.234 ms``."""
    if seconds is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def span(low: float, high: float) -> str:
    """``1.234 .. 1.456 ms``, in the unit of the larger."""
    unit = duration(high).split()[1]
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    return f"{low * scale:.4g} .. {high * scale:.4g} {unit}"


def _ran(row: Row) -> str:
    """The backend, and the name of its form."""
    form = row.form.partition(":")[0]
    return row.backend + (form and f", {form}") + " (auto)" * row.auto


def row_table(rows: list[Row], out: Console) -> Any:
    """What was timed or failed, as an aligned table; what was skipped, once for each reason, below it."""
    skipped: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.status == "skipped":
            skipped.setdefault((row.contender, row.note), []).append(row.case)
    headers = ("case", "gates", "contender", "ran", "median", "quartiles", "peak", "error", "", "")
    cells = [
        (
            row.case,
            row.gates,
            row.contender,
            _ran(row),
            duration(row.seconds),
            "" if row.seconds is None else span(row.low or 0.0, row.high or 0.0),
            "" if row.peak_bytes is None else report.size(row.peak_bytes),
            "" if row.error is None else f"{row.error:.1e}",
            row.status,
            row.note,
        )
        for row in rows
        if row.status != "skipped"
    ]
    text, hidden = Text(), 0
    if len(cells) > 1 and len({row[:2] for row in cells}) == 1:  # said once: the table is narrower
        text.append(f"  {cells[0][0]}, gates {cells[0][1]}\n")
        hidden = 2
    text.append_text(report.table(headers[hidden:], [row[hidden:] for row in cells], out))
    for (contender, note), names in skipped.items():
        where = names[0] if len(names) == 1 else f"{len(names)} rows"
        line = report.wrapped(f"  skipped {contender} ({where}): {note}\n", out)
        line.stylize("yellow")
        text.append_text(line).append("\n")
    return text


def figure_table(figures: list[Figure], out: Console, judged: bool) -> Any:
    """The figures. ``judged``: each beside what was promised of it on the hardware that its preset is for."""
    marks = {True: "met", False: "MISSED", None: ""}
    if not judged:
        return report.table(
            ("figure", "measured", ""), [(f.name, f"{f.value:.4g} {f.unit}", f.note) for f in figures], out
        )
    cells = [(f.name, f"{f.value:.4g} {f.unit}", f.want, marks[f.met], f.note) for f in figures]
    return report.table(("figure", "measured", "wanted", "", ""), cells, out)
