"""Running the conformance suite on this machine and keeping a record of it: what ``kdacore verify`` does."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdacore import config, files, machine
from kdacore.progress import Bar
from kdacore.registry import REGISTRY, missing

if TYPE_CHECKING:
    from kdacore.testing.cases import Case
    from kdacore.testing.matrix import Level
    from kdacore.testing.random_cases import Calls
    from kdacore.testing.suite import Result
    from kdacore.types import ArrayKind

    Item = Case | tuple[Calls, int]
    """A case of the table, or which ops a random call is of and its seed."""

SCHEMA = 1
_PACKAGES = ("kdacore", "numpy", "torch", "triton", "jax", "jaxlib", "ml_dtypes")


@dataclass(frozen=True)
class Report:
    """What one run of the suite found, as it is written to a file."""

    backend: str
    backend_version: str
    device: str
    """Type and architecture, for example ``cuda (sm_90)``."""
    level: str
    seed: int
    started: str
    """UTC, ISO 8601."""
    seconds: float
    commit: str
    """The commit of the checkout kdacore runs from; empty when it is installed."""
    machine: dict[str, str]
    versions: dict[str, str]
    served: int
    declined: dict[str, int]
    """Cases declined for each reason code."""
    cases: list[dict[str, Any]]
    """One row a case: id, status, seconds, codes, worst error and its bound; failed ones with the whole message."""
    worst: dict[str, dict[str, Any]]
    """The case that came nearest its bound, for each check."""
    problems: list[str] = field(default_factory=list)
    """What is wrong beyond single cases: an op that is declared and never served."""
    notes: list[str] = field(default_factory=list)
    """What could not be tried on this machine."""
    interrupted: bool = False
    """The run was ended before its last case: ``cases`` are those that had run."""
    schema: int = SCHEMA

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Rows of the failed cases."""
        return [row for row in self.cases if row["status"] == "failed"]

    @property
    def ok(self) -> bool:
        """All cases ran, everything that was served met the contract, and everything declared was served."""
        return not self.failures and not self.problems and not self.interrupted

    def to_json(self) -> str:
        """The record as text; infinite errors are null."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Report:
        """A record read back. ValueError when it is of another schema."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            got = found.get("schema") if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"verification record schema {got!r}; wanted {SCHEMA}")
        return Report(**found)

    def write(self, path: Path) -> None:
        """Write the record, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        files.remove_stale(path.parent)
        files.write_whole(path, self.to_json())

    def lines(self) -> list[str]:
        """A short account for people."""
        total = len(self.cases)
        text = [
            f"{self.backend} {self.backend_version} on {self.device}, {self.level}: {total} cases in "
            f"{self.seconds:.1f} s; {self.served} served, {sum(r['status'] == 'declined' for r in self.cases)} "
            f"declined, {len(self.failures)} failed"
        ]
        text += [f"  declined for {code}: {count}" for code, count in sorted(self.declined.items())]
        text += [
            f"  worst {check}: {_amount(row)} in {row['case']}" for check, row in sorted(self.worst.items())
        ]
        text += [f"  note: {note}" for note in self.notes]
        text += [f"  PROBLEM {problem}" for problem in self.problems]
        if self.interrupted:
            text.append("  interrupted: the cases above are those that had run")
        return [*text, *_failed(self.failures)]


def _failed(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What went wrong in each case; a traceback once for each error, which may be that of every case."""
    seen: set[str] = set()
    for row in rows:
        message = row["message"].strip()
        error = message.rpartition("\n")[2]
        again = message.startswith("Traceback") and error in seen
        yield f"  FAILED {row['id']}: {error} (as above)" if again else f"  FAILED {row['id']}: {message}"
        seen.add(error)


def _amount(row: dict[str, Any]) -> str:
    error = "infinite" if row["error"] is None else f"{row['error']:.2e}"
    return f"{error} of {row['bound']:.2e} allowed ({row['what']})"


def verify(
    backend: str,
    device: str | None = None,
    level: Level = "quick",
    random: int = 0,
    *,
    seed: int = 0,
    kinds: tuple[ArrayKind, ...] = (),
    jobs: int = 1,
    path: Path | None = None,
    progress: bool = True,
) -> Report:
    """Run the conformance suite for a backend on this machine.

    Args:
        backend: a registered name.
        device: ``cpu``, ``cuda`` or ``tpu``; the backend's own first choice when None.
        level: ``quick`` or ``full``.
        random: how many random calls of whole ops, and as many of stages, to run after the table of cases.
        seed: of the first random call; the others count up from it.
        kinds: only these array kinds.
        jobs: processes; 1 runs everything in this one.
        path: where to write the record; nowhere when None.
        progress: show a progress bar on standard error.

    Returns:
        The report; ``report.ok`` says whether the backend conforms.

    An interruption (Ctrl-C, SIGTERM) ends the run; the report is then of the cases that have run, if any.

    Raises:
        ContractError: there is no backend of that name.
    """
    from kdacore.testing.capabilities import has_device
    from kdacore.testing.matrix import plan
    from kdacore.testing.random_cases import NothingServedError, calls_of
    from kdacore.testing.serving import device_of
    from kdacore.testing.suite import coverage_problems

    registered = REGISTRY.get(backend)
    started = datetime.datetime.now(datetime.timezone.utc)
    start = time.perf_counter()
    results: list[Result] = []
    notes: list[str] = []
    problems = [
        f"not usable here: {what}; to get it: {remedy}" for _, what, remedy in missing(registered.backend)
    ]
    where, interrupted = device or "cpu", False
    if not problems:
        planned = plan(backend, device=device, level=level, kinds=kinds)
        where, notes = planned.device, list(planned.notes)
        draw = _Drawn(backend, planned.device, level, kinds)
        items: list[Item] = list(planned.cases)
        for calls in calls_of(backend) if random else ():
            try:
                draw.case((calls, seed))
            except NothingServedError as error:  # nor is any other seed's
                notes.append(f"no random calls: {error}")
                continue
            items += [(calls, seed + n) for n in range(random)]
        with _bar(len(items), backend, progress) as advance:
            found = _results(draw, items, jobs, advance)
            results += found
        interrupted = len(found) < len(items)
        if not interrupted:
            table = found[: len(planned.cases)]
            problems += coverage_problems((r.case, r.status != "declined", r.codes) for r in table)
        kind = next((c.kind for c in planned.cases if has_device(c.kind, where)), None)
        where = where if kind is None else f"{where} ({device_of(kind, where).arch or platform.machine()})"
    report = Report(
        backend=backend,
        backend_version=registered.backend.version,
        device=where,
        level=level,
        seed=seed,
        started=started.isoformat(timespec="microseconds"),
        seconds=round(time.perf_counter() - start, 3),
        commit=machine.commit(),
        machine=_machine(),
        versions=_versions(),
        served=sum(r.status == "served" for r in results),
        declined=_declined(results),
        cases=[_row(r) for r in results],
        worst=_worst(results),
        problems=problems,
        notes=notes,
        interrupted=interrupted,
    )
    if path is not None:
        report.write(path)
    return report


@dataclass(frozen=True)
class _Drawn:
    """How the random calls of a run are drawn, from their seeds."""

    backend: str
    device: str
    level: Level
    kinds: tuple[ArrayKind, ...]

    def case(self, item: Item) -> Case:
        """A case as it is, or the one of a seed."""
        from kdacore.testing.random_cases import random_case

        if not isinstance(item, tuple):
            return item
        calls, seed = item
        return random_case(self.backend, seed, self.device, self.level, calls, self.kinds)

    def run(self, item: tuple[int, Item]) -> tuple[int, Result]:
        from kdacore.testing.suite import run_case

        return item[0], run_case(self.case(item[1]))

    def lost(self, item: tuple[int, Item], text: str) -> tuple[int, Result]:
        from kdacore.testing.suite import Result

        return item[0], Result(self.case(item[1]), "failed", message=text)


def _has_failed(found: tuple[int, Result]) -> bool:
    return found[1].status == "failed"


def _results(drawn: _Drawn, items: list[Item], jobs: int, advance: Callable[[Result], None]) -> list[Result]:
    """The results of cases and of the calls of seeds, in their order; after an interruption, of those that have run.
    ``advance`` is called with each result as it comes."""
    from kdacore.testing import processes

    numbered = iter(list(enumerate(items)))
    if jobs <= 1:
        done: Iterator[tuple[int, Result]] = map(drawn.run, numbered)
    else:
        work = processes.Work(drawn.run, _has_failed, drawn.lost)
        done = processes.run(work, numbered, min(jobs, len(items)))
    found: dict[int, Result] = {}
    try:
        for n, result in done:
            found[n] = result
            advance(result)
    except KeyboardInterrupt:  # what has run took minutes and is not thrown away
        if not found:
            raise
    return [found[n] for n in sorted(found)]


def default_path(report: Report, folder: Path | None = None) -> Path:
    """Where ``kdacore verify`` puts a record; runs side by side have begun at other microseconds."""
    started = report.started.replace(":", "").partition("+")[0]
    name = f"{report.backend}-{report.device.split()[0]}-{report.level}-{started}.json"
    return (folder or default_folder()) / name


def default_folder() -> Path:
    """Where records go unless told: a folder of the cache folder."""
    return config.get().cache_dir / "verify"


def load_records(folder: Path) -> list[Report]:
    """Every record in a folder, oldest first. Files of another schema are an error, not ignored."""
    found = [Report.from_json(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda r: r.started)


# --- rows ----------------------------------------------------------------------------------------------------------


def _row(result: Result) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": result.case.id,
        "status": result.status,
        "seconds": round(result.seconds, 4),
        "seed": result.case.seed,
    }
    if result.codes:
        row["codes"] = list(result.codes)
    if (worst := result.worst) is not None:
        row.update(what=worst.what, error=_finite(worst.error), bound=worst.bound)
    if result.status == "failed":
        row["message"] = result.message
        row["case"] = dataclasses.asdict(result.case)
    return row


def _worst(results: list[Result]) -> dict[str, dict[str, Any]]:
    found: dict[str, tuple[float, dict[str, Any]]] = {}
    for r in results:
        f = r.worst
        if f is None:
            continue
        ratio = f.error / f.bound
        if ratio > found.get(r.case.check, (-1.0, {}))[0]:
            row = {"case": r.case.id, "what": f.what, "error": _finite(f.error), "bound": f.bound}
            found[r.case.check] = (ratio, row)
    return {check: row for check, (_, row) in found.items()}


def _declined(results: list[Result]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for code in (code for r in results if r.status == "declined" for code in r.codes):
        counts[code] = counts.get(code, 0) + 1
    return counts


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


# --- where this ran ------------------------------------------------------------------------------------------------


def _machine() -> dict[str, str]:
    found = {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = str(torch.version.cuda)
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def _bar(total: int, backend: str, show: bool) -> Iterator[Callable[[Result], None]]:
    """A progress bar that says how many cases were declined and failed so far."""
    status = {"served": 0, "declined": 0, "failed": 0}
    with Bar(f"verify {backend}", total, show=show, transient=False) as bar:

        def advance(result: Result) -> None:
            status[result.status] += 1
            bar.advance(f"{status['declined']} declined, {status['failed']} failed")
            if result.status == "failed":
                bar.print(f"FAILED {result.case.id} (seed {result.case.seed})")

        yield advance
