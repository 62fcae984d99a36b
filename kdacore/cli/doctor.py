"""``kdacore doctor``: what is here, what works, what does not and why, and the line that would make it so.

The report is one dictionary; ``--json`` prints it and the text is rendered from it, so the two say the same.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from kdacore import config, feature_matrix, integrations, machine, plugin_faults, registry, report
from kdacore.calls.description import CallDescription
from kdacore.cli import call_arguments, doctor_costs, doctor_selfcheck
from kdacore.dispatch import selection
from kdacore.errors import ConfigError, PerformanceWarning, PluginError, did_you_mean, list_names
from kdacore.feature_matrix import explain_call
from kdacore.machine import Machine
from kdacore.registry import (
    BY_HAND,
    OWN_DISTRIBUTION,
    REGISTRY,
    PluginRecord,
    Registered,
    probe,
)
from kdacore.selfcheck import check as selfcheck
from kdacore.types import Backend

SCHEMA = 1
"""Version of the report's layout; raised when a field changes its meaning or goes away."""
SCHEMA_FILE = "doctor.schema.json"
"""The layout as JSON Schema, beside this file."""

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="all there is to say of these backends")
    parser.add_argument("-v", "--verbose", action="store_true", help="the whole report, not its summary")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of --json, and nothing else"
    )
    parser.add_argument(
        "--no-selfcheck", action="store_true", help="do not run the backends against the oracle"
    )
    call_arguments.add_arguments(parser, required=False)


def run(args: argparse.Namespace) -> int:
    if args.schema:
        print(resources.files("kdacore.cli").joinpath(SCHEMA_FILE).read_text(encoding="utf-8"), end="")
        return report.OK
    for name in args.names:
        REGISTRY.get(name, "doctor", "NAME")
    about_a_call = args.op or args.shape
    if not about_a_call and (stray := call_arguments.given(args)):
        print(f"kdacore doctor: {', '.join(stray)}: about a call; --op says which", file=sys.stderr)
        return report.USAGE
    call = call_arguments.call_of(args) if about_a_call else None
    spinner = Console(stderr=True).status("looking at the machine, the plugins and what they compute")
    with spinner, _stdout_aside():  # what plugins print is no part of the report
        quick = not (args.names or args.verbose or args.json)
        found = collect(not args.no_selfcheck, call, args.backend, tuple(args.names), quick)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found, args)
    status: int = found["exit"]
    return status


def _print(found: Report, args: argparse.Namespace) -> None:
    from kdacore.cli import doctor_summary, doctor_text

    out = report.console()
    if args.names:
        doctor_summary.verdict(found, out)
        doctor_text.render_backends(found, args.names, out)
    elif args.verbose:
        doctor_summary.verdict(found, out)
        doctor_text.render(found, out)
    else:
        doctor_summary.render(found, out)


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """What is printed goes to standard error, also what libraries in C or children write to the file descriptor."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of the two is closed
        saved = -1
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved >= 0:
            os.dup2(saved, 1)
            os.close(saved)


_IMPORT_SECONDS = 60.0
_IMPORT = """
import sys
from kdacore.registry import third_parties
for distribution, entry in third_parties()[0]:
    if (distribution, entry.name) == (sys.argv[1], sys.argv[2]):
        try:
            entry.load()
        except BaseException:
            pass  # an error is found, and shown whole, where the plugin is loaded
"""


@contextlib.contextmanager
def _without_deadly_plugins(problem: Any) -> Iterator[None]:
    """Import each third party's plugin in a child first; those that end or hang the child are not loaded here."""
    disabled = config.get().disabled_plugins
    found = [] if "all" in disabled else registry.third_parties()[0]
    asked = [(where, entry.name) for where, entry in found if entry.name not in disabled]
    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(lambda pair: _import_in_child(*pair), asked))
    deadly = [(where, name, what) for (where, name), what in zip(asked, said, strict=True) if what]
    for where, name, what in deadly:
        problem(
            f"plugin {name} ({where})",
            f"its import, tried in a process of its own: {what}; it is not loaded here",
        )
    with REGISTRY.without([name for _, name, _ in deadly]):
        yield


def _import_in_child(distribution: str, name: str) -> str:
    """What became of a child that imported a plugin; empty when it lives."""
    try:
        code = f"{_IMPORT}\nprint('kdacore-imported')"
        done = machine.start(code, [distribution, name], _IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end within {_IMPORT_SECONDS:g} s"
    except OSError:  # no child can be started: the other checks say so
        return ""
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    if done.returncode or "kdacore-imported" not in done.stdout:  # a child of its own may have said that
        return f"the process ended with status {done.returncode}"
    return ""


def collect(
    selfchecks: bool = True,
    call: CallDescription | None = None,
    backend: str | None = None,
    names: tuple[str, ...] = (),
    quick: bool = False,
) -> Report:
    """Look at everything. ``problems`` is empty exactly when ``exit`` is 0.

    Args:
        selfchecks: run the backends against the oracle.
        call: also explain this call.
        backend: the one it is forced on.
        names: of the backends that are run; all of them where empty.
        quick: run them on the calls that take least.
    """
    problems: list[dict[str, str]] = []

    def problem(where: str, what: str) -> None:
        problems.append({"where": where, "what": what})

    with _readable_environment() as faults, contextlib.ExitStack() as inside:
        for fault in faults:
            problem(f"environment variable {fault.variable}", f"is {fault.got!r}; wanted {fault.want}")
        inside.enter_context(_without_deadly_plugins(problem))
        where = machine.probe()
        for row in where.rows:
            if row.problem:
                problem(row.name, row.problem)
        found: Report = {
            "schema": SCHEMA,
            "machine": [dataclasses.asdict(row) for row in where.rows],
            "versions": [dataclasses.asdict(row) for row in machine.versions()],
            "environment": _environment({f.variable: f for f in faults}, problem),
            "integrations": _integrations(problem),
            "plugins": [_plugin(p, problem) for p in REGISTRY.plugins()],
        }
        registered = list(REGISTRY.backends().values())
        found["backends"] = [_backend(r, where, problem) for r in registered]
        found["features"] = _features(registered, where, problem)
        found["caches"] = _caches()
        found["costs"] = doctor_costs.rows(where, problem)
        available = {b["name"] for b in found["backends"] if b["status"] == "available"}
        usable = [
            r for r in registered if r.backend.name in available and r.backend.name in (names or available)
        ]
        found["selfchecks"] = _selfchecks(usable, where, problem, quick) if selfchecks else []
        found["selfchecks_run"] = selfchecks
        found["refusals"] = [refusal._asdict() for refusal in selfcheck.refusals()]
        found["checks"] = _plugin_checks(problem)
        if call is not None:
            found["call"] = _call(call, backend)
        found["passed_over"] = _passed_over(registered, where)
        for raised in plugin_faults.faults():
            problem(raised.where, raised.what)
    found["problems"] = problems
    found["exit"] = report.BROKEN if problems else report.OK
    return found


@contextlib.contextmanager
def _readable_environment() -> Iterator[list[ConfigError]]:
    """Set variables that cannot be parsed aside, so that everything else can still be looked at."""
    aside: dict[str, str] = {}
    faults: list[ConfigError] = []
    try:
        while True:
            try:
                config.refresh() if faults else config.get()
                break
            except ConfigError as error:
                faults.append(error)
                aside[error.variable] = os.environ.pop(error.variable)
        yield faults
    finally:
        os.environ.update(aside)


def _environment(faults: dict[str, ConfigError], problem: Any) -> list[dict[str, str]]:
    rows = []
    for name, meaning in config.VARIABLES.items():
        value = faults[name].got if name in faults else os.environ.get(name)
        if value is not None:
            rows.append({"name": name, "value": value, "meaning": meaning})
    for name in config.get().backend:
        if name not in REGISTRY.backends():
            problem("environment variable KDACORE_BACKEND", f"names {name!r}, which is no backend here")
    plugins = REGISTRY.plugins()
    for name in sorted(config.get().disabled_plugins - {"all"} - {p.name for p in plugins if p.disabled}):
        of_it = [p.name for p in plugins if p.distribution == name != OWN_DISTRIBUTION]
        hint = f"; the plugin of that distribution is named {list_names(of_it)}" if of_it else ""
        problem(
            "environment variable KDACORE_DISABLE_PLUGINS",
            f"names {name!r}, which is no third-party plugin here{hint}",
        )
    unknown = list(config.unknown())
    rows += [{"name": n, "value": os.environ[n], "meaning": _not_read(n)} for n in unknown]
    return rows


def _not_read(variable: str) -> str:
    return f"not a variable kdacore reads{did_you_mean(variable, config.VARIABLES)}"


def _integrations(problem: Any) -> list[dict[str, Any]]:
    """Each integration; counts of calls are this process's, so there are none unless it has imported one."""
    rows = []
    for found in integrations.status():
        row = dataclasses.asdict(found)
        row["status"] = "active" if found.active else "not active" if found.host else "host not installed"
        rows.append(row)
        if not found.host and found.name in config.get().integrations:
            problem(
                "environment variable KDACORE_INTEGRATIONS", f"names {found.name!r}, which is not installed"
            )
    return rows


def _plugin(record: PluginRecord, problem: Any) -> dict[str, Any]:
    status = "disabled" if record.disabled else "problem" if record.problem else "ok"
    if record.problem:
        problem(f"plugin {record.name} ({record.distribution})", record.problem)
    return {
        "name": record.name,
        "distribution": record.distribution,
        "status": status,
        "milliseconds": round(record.seconds * 1e3, 1),
        "backends": list(record.backends),
        "problem": record.problem,
        "detail": record.detail,
    }


def _backend(registered: Registered, where: Machine, problem: Any) -> dict[str, Any]:
    backend = registered.backend
    asked = [(requirement, *probe(requirement)) for requirement in backend.requirements]
    gone = [(requirement, what) for requirement, what, _ in asked if what is not None]
    raised = [text for _, _, text in asked if text]
    for text in raised:
        problem(f"backend {backend.name}", text)
    status = "problem" if raised else "not available" if gone else "available"
    arch = _architectures(backend, where)
    return {
        "name": backend.name,
        "version": backend.version,
        "distribution": registered.distribution,
        "status": status,
        "summary": backend.summary,
        "kinds": list(backend.kinds),
        "places": [str(p) for p in feature_matrix.places_of(backend, where)],
        "missing": [{"name": r.name, "what": what, "remedy": r.remedy} for r, what in gone],
        "ops": {op: _mark(impl.verified_archs, arch) for op, impl in backend.ops.items()},
    }


def _architectures(backend: Backend, where: Machine) -> set[str]:
    """The architectures of this machine's devices that automatic choice may use the backend on; "" is the CPU's."""

    def serves(device_type: str) -> bool:
        kinds = (backend.device_types, backend.auto_device_types or ("*",))
        return all("*" in types or device_type in types for types in kinds)

    found = {a.arch for a in where.accelerators if serves(a.type)}
    return found | {""} if serves("cpu") else found


_ARCH_NAMES = {"*": "any hardware", "": "CPUs"}


def _mark(verified: frozenset[str], here: set[str]) -> dict[str, Any]:
    """The architectures that something is verified on, and what that says of those ``here``."""
    known = "*" in verified or (bool(here) and here <= verified)
    return {
        "verified_on": sorted(_ARCH_NAMES.get(arch, arch) for arch in verified),
        "here": "verified" if known else "compiled only" if here else "no device",
    }


def _features(registered: list[Registered], where: Machine, problem: Any) -> list[dict[str, Any]]:
    answers, raised = feature_matrix.matrix(registered, where)
    for message in raised:
        problem("verifier", message)
    return [
        {"op": a.op, "feature": a.feature, "backend": a.backend, "answer": a.text, "on": list(a.on)}
        for a in answers
    ]


def _caches() -> list[dict[str, Any]]:
    root = config.get().cache_dir
    try:
        inside = sorted(p for p in root.iterdir() if p.is_dir())
    except OSError:  # absent, no folder or not ours to read: its row says which
        inside = []
    return [_folder(path) for path in (root, *inside)]


def _folder(path: Path) -> dict[str, Any]:
    files = size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # it may go away while being looked at
                size += os.lstat(os.path.join(folder, name)).st_size
                files += 1
    return {"path": str(path), "state": _state(path), "files": files, "bytes": size}


def _state(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "absent"
    except NotADirectoryError:
        return "not a folder"
    except OSError:  # a folder on the way to it cannot be entered
        return "unreadable"
    if not stat.S_ISDIR(mode):
        return "not a folder"
    if not os.access(path, os.R_OK | os.X_OK):
        return "unreadable"
    return "writable" if os.access(path, os.W_OK) else "read-only"


def _selfchecks(usable: list[Registered], where: Machine, problem: Any, quick: bool) -> list[dict[str, Any]]:
    def check(r: Registered) -> list[doctor_selfcheck.Check]:
        return doctor_selfcheck.run(r, where, in_child=r.distribution != BY_HAND, quick=quick)

    with ThreadPoolExecutor(2) as pool:
        rows = [row for rows in pool.map(check, usable) for row in rows]
    for row in rows:
        if row.status != "ok":
            said = row.detail or f"relative error {row.error:.1e}, bound {row.bound:.1e}"
            place = f" on {row.place}" if row.place else ""
            problem(
                f"backend {row.backend}", f"self-check of {row.op}{place} ({row.call}): {row.status}: {said}"
            )
    return [dataclasses.asdict(row) for row in rows]


def _call(call: CallDescription, backend: str | None) -> dict[str, Any]:
    """The selection for one call; a call that breaks the contract is an error of the command line."""
    try:
        return call_arguments.selection_dict(explain_call(call, backend))
    except ConfigError as error:
        return {"text": str(error)}  # the variable is among the problems already


def _passed_over(registered: list[Registered], where: Machine) -> list[dict[str, str]]:
    """The backends of others that automatic choice passes over in plain calls, since their cost is not known.

    ``kdacore_choose`` is asked on the way, so that a hook that raises is reported.
    """
    rows: dict[str, dict[str, str]] = {}
    places = dict.fromkeys(place for r in registered for place in feature_matrix.places_of(r.backend, where))
    with warnings.catch_warnings():
        for listed in (RuntimeWarning, PerformanceWarning):  # the report says it too
            warnings.simplefilter("ignore", listed)
        for place in places:
            for op in ("chunk_kda", "fused_recurrent_kda"):
                request = feature_matrix.request_of(
                    feature_matrix.at(feature_matrix.plain_calls(op)[-1], place)
                )
                found = selection.decide(request, selection.Policy(), run_selfchecks=False, assumed=True)
                for name in selection.passed_over(found):
                    text = selection.passed_over_text(name, found)
                    rows.setdefault(name, {"backend": name, "op": op, "on": str(place), "what": text})
    return list(rows.values())


_MOST_CHECKS = 1000
"""The most checks of one plugin; more come from a generator that has no end."""


def _rows_of(checks: Callable[[], Any]) -> list[tuple[str, bool, str]]:
    given = list(itertools.islice(checks(), _MOST_CHECKS + 1))
    if len(given) > _MOST_CHECKS:
        raise PluginError(f"gives more than {_MOST_CHECKS} checks")
    return [(str(name), bool(passed), str(detail)) for name, passed, detail in given]


def _plugin_checks(problem: Any) -> list[dict[str, Any]]:
    """The rows plugins add; one that raises is a row of its own and silences nobody else."""
    rows: list[dict[str, Any]] = []
    for hook in REGISTRY.hooks().kdacore_doctor_checks.get_hookimpls():
        given, error = plugin_faults.attempt(_rows_of, hook.function)
        if error is not None:  # its traceback is the finding
            text = f"raised {plugin_faults.shown(error)}\n{plugin_faults.traceback_of(error)}"
            given = [("kdacore_doctor_checks", False, text)]
        for name, passed, detail in given:
            rows.append({"plugin": hook.plugin_name, "name": name, "passed": passed, "detail": detail})
            if not passed:
                problem(f"plugin {hook.plugin_name}", f"check {name!r} failed: {detail}")
    return rows
