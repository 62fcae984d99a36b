"""The doctor's report as text: the same dictionary that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from kdacore import report

Report = dict[str, Any]
Rows = Sequence[Sequence[str]]


def render(found: Report, out: Console) -> None:
    """Print every section."""
    out.print(Text(f"\nkdacore doctor (report schema {found['schema']})\n", style="bold"))
    _facts(out, "machine", found["machine"])
    _facts(out, "versions", found["versions"])
    if found["environment"]:
        rows: Rows = [(r["name"], r["value"], r["meaning"]) for r in found["environment"]]
        _section(out, "environment", ("variable", "value", "meaning"), rows)
    _integrations(out, found["integrations"])
    _plugins(out, found["plugins"])
    _backends(out, found["backends"])
    _features(out, found["features"])
    rows = [
        (c["path"], c["state"], str(c["files"]), f"{c['bytes']} bytes ({report.size(c['bytes'])})")
        for c in found["caches"]
    ]
    _section(out, "caches", ("folder", "state", "files", "size"), rows)
    rows = [tuple(c[key] for key in ("table", "device", "when", "status")) for c in found["costs"]]
    _section(out, "cost tables for automatic choice", ("table", "measured on", "on", "status"), rows)
    _passed_over(out, found["passed_over"])
    _selfchecks(out, found)
    _refusals(out, found["refusals"])
    if found["checks"]:
        rows = [
            (c["plugin"], c["name"], "ok" if c["passed"] else "FAILED", c["detail"]) for c in found["checks"]
        ]
        _section(out, "checks of plugins", ("plugin", "check", "", "detail"), rows)
    if "call" in found:
        out.print(report.heading("the call"), end="")
        out.print(found["call"]["text"] + "\n")
    _problems(out, found)


def render_backends(found: Report, names: Sequence[str], out: Console) -> None:
    """Print what the report says of some backends."""
    _backends(out, [b for b in found["backends"] if b["name"] in names])
    _features(out, [a for a in found["features"] if a["backend"] in names])
    of_them = [c for c in found["selfchecks"] if c["backend"] in names]
    _selfchecks(out, {**found, "selfchecks": of_them})
    _refusals(out, [r for r in found["refusals"] if r["backend"] in names])
    _passed_over(out, [r for r in found["passed_over"] if r["backend"] in names])


def _section(out: Console, title: str, headers: tuple[str, ...], rows: Rows) -> None:
    out.print(report.heading(title), end="")
    out.print(report.table(headers, rows, out))


def _facts(out: Console, title: str, rows: list[dict[str, str]]) -> None:
    _section(out, title, ("", ""), [(r["name"], r["value"]) for r in rows])


def _integrations(out: Console, rows: list[Report]) -> None:
    shown = [(r["name"], r["host"] or "not installed", r["status"], r["place"]) for r in rows]
    _section(out, "integrations", ("integration", "host", "status here", "hooked into, once imported"), shown)
    for row in rows:
        if row["hooks"]:
            counts = [
                (h["function"], h["place"], str(h["served"]), str(h["declined"]), h["reason"])
                for h in row["hooks"]
            ]
            headers = ("function", "hooked into", "calls taken", "declined", "why the last was")
            out.print(report.table(headers, counts, out))
        elif row["host"]:
            out.print(f"  {row['name']}: import kdacore.integrations.{row['name']} hands over")
            out.print(f"    {', '.join(row['functions'])}")
    out.print("  how often each was called in your process: kdacore.integrations.status()\n")


def _plugins(out: Console, plugins: list[Report]) -> None:
    rows = [
        (
            p["name"],
            p["distribution"],
            p["status"],
            f"{p['milliseconds']} ms",
            ", ".join(p["backends"]) or p["problem"],
        )
        for p in plugins
    ]
    _section(out, "plugins", ("plugin", "distribution", "status", "import", "backends"), rows)
    for plugin in plugins:
        if plugin["detail"]:
            out.print(Text(f"  {plugin['name']}: {plugin['problem']}", style="red"))
            out.print(Text(_indented(plugin["detail"]), style="dim"))


def _backends(out: Console, backends: list[Report]) -> None:
    rows = [(b["name"], b["version"], b["distribution"], b["status"], b["summary"]) for b in backends]
    _section(out, "backends", ("backend", "version", "distribution", "status", ""), rows)
    for backend in backends:
        out.print(
            f"  {backend['name']}: takes {', '.join(backend['kinds'])}; asked about {', '.join(backend['places'])}"
        )
        for gone in backend["missing"]:
            out.print(f"    missing {gone['name']}: {gone['what']}; to get it: {gone['remedy']}")
        for (here, on), ops in _by_hardware(backend["ops"]):
            tested = f"verified on {', '.join(on) or 'nothing yet'}"
            out.print(f"    {here} here ({tested}): {', '.join(ops)}")
    out.print()


def _by_hardware(ops: dict[str, Report]) -> list[tuple[tuple[str, tuple[str, ...]], list[str]]]:
    """Ops with the same marks side by side."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for op, marks in ops.items():
        groups.setdefault((marks["here"], tuple(marks["verified_on"])), []).append(op)
    return list(groups.items())


def _features(out: Console, answers: list[Report]) -> None:
    names = list(dict.fromkeys(a["backend"] for a in answers))
    out.print(report.heading("what each backend serves, once all it requires is there"), end="")
    for ops, rows in _same_answers(answers, names):
        out.print(report.table((ops[0], *names), rows, out), end="")
        for other in ops[1:]:
            out.print(f"  and {other} the same")
        out.print()


def _same_answers(answers: list[Report], names: list[str]) -> list[tuple[list[str], list[tuple[str, ...]]]]:
    """One table for the ops that get the same answers."""
    cells: dict[str, dict[str, dict[str, str]]] = {}
    for a in answers:
        cells.setdefault(a["op"], {}).setdefault(a["feature"], {})[a["backend"]] = a["answer"]
    tables: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for op, features in cells.items():
        rows = tuple((f, *(said.get(name, "") for name in names)) for f, said in features.items())
        tables.setdefault(rows, []).append(op)
    return [(ops, list(rows)) for rows, ops in tables.items()]


def _selfchecks(out: Console, found: Report) -> None:
    if not found["selfchecks_run"]:
        out.print(report.heading("self-checks"), end="")
        out.print("  not run (--no-selfcheck)\n")
        return
    rows = [
        (
            c["backend"],
            c["op"],
            c["place"],
            c["call"],
            c["mark"],
            "" if c["error"] is None else f"{c['error']:.1e}",
            f"{c['bound']:.1e}",
            c["status"],
            c["detail"],
        )
        for c in found["selfchecks"]
    ]
    headers = ("backend", "op", "where", "call", "hardware", "error", "bound", "", "")
    _section(out, "self-checks against the oracle", headers, rows)


def _refusals(out: Console, refusals: list[Report]) -> None:
    rows = [tuple(r[key] for key in ("backend", "op", "arch", "found", "file")) for r in refusals]
    if rows:
        headers = ("backend", "op", "on", "found", "calls like it go elsewhere, unless this file goes")
        _section(out, "kernels not verified here that gave wrong results before", headers, rows)


def _passed_over(out: Console, found: list[Report]) -> None:
    rows = [(r["on"], r["op"], r["what"]) for r in found]
    if rows:
        _section(out, "passed over by automatic choice", ("on", "op", ""), rows)


def _problems(out: Console, found: Report) -> None:
    if not found["problems"]:
        out.print(Text(f"all that is installed works (exit {found['exit']})", style="green"))
        return
    out.print(Text(f"{len(found['problems'])} problems (exit {found['exit']})", style="bold red"))
    for p in found["problems"]:
        out.print(Text(f"  {p['where']}: {p['what']}".rstrip(), style="red"))


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
