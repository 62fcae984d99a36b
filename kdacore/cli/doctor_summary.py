"""The doctor's report in a screen: the verdict, problems, and a line about each part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from kdacore import config, report

Report = dict[str, Any]
_INDENT, _NAMES = 2, 13
_MOST_PROBLEMS = 8
_VERSIONS = ("kdacore", "python", "numpy", "torch", "triton", "jax")
_MACHINE = ("system", "cpu", "nvidia driver", "torch", "jax")
_KINDS = {"numpy": "NumPy", "torch": "torch", "jax": "JAX"}


def render(found: Report, out: Console) -> None:
    """Print the summary of a report."""
    verdict(found, out)
    for name, text in _parts(found):
        start = f"{' ' * _INDENT}{name:<{_NAMES}} "
        out.print(report.hanging(start, text, out))
    if "call" in found:
        out.print()
        out.print(report.wrapped(found["call"]["text"], out))
    out.print(Text("all of it: kdacore doctor -v; of a backend: kdacore doctor NAME", style="dim"))


def verdict(found: Report, out: Console) -> None:
    """Print whether all is well, and each problem in a line."""
    problems = found["problems"]
    if not problems:
        out.print(Text(f"all that is installed works (exit {found['exit']})", style="green"))
        return
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    out.print(Text(f"{count} (exit {found['exit']})", style="bold red"))
    for p in problems[:_MOST_PROBLEMS]:
        first = p["what"].strip().partition("\n")[0]
        out.print(report.hanging(f"{' ' * _INDENT}{p['where']}: ", first, out), style="red")
    if len(problems) > _MOST_PROBLEMS:
        out.print(Text(f"  and {len(problems) - _MOST_PROBLEMS} more", style="red"))


def _parts(found: Report) -> Iterator[tuple[str, str]]:
    rows = {row["name"]: row["value"] for row in found["machine"]}
    yield "machine", "; ".join([_named(name, rows[name]) for name in _MACHINE if name in rows])
    versions = {row["name"]: row["value"] for row in found["versions"] if row["value"] != "not installed"}
    yield "versions", ", ".join([f"{name} {versions[name]}" for name in _VERSIONS if name in versions])
    for backend in found["backends"]:
        yield backend["name"], _backend(backend)
    others = [p for p in found["plugins"] if p["distribution"] != "kdacore"]
    if others:
        listed = [f"{p['name']} ({p['distribution']}): {p['status']}" for p in others]
        yield "plugins", ", ".join(listed)
    yield "self-checks", _selfchecks(found)
    hosts = [row for row in found["integrations"] if row["host"]]
    if hosts:
        yield "integrations", ", ".join([f"{row['host']} ({row['status']})" for row in hosts])
    used = [row for row in found["costs"] if row["status"].startswith("used")]
    yield (
        "costs",
        ", ".join([f"{row['table']}: {row['status']}" for row in used]) or "no table for this machine",
    )
    for row in found["passed_over"]:
        yield "passed over", row["what"]
    if found["refusals"]:
        yield (
            "refusals",
            f"{len(found['refusals'])} kernels gave wrong results here and are not used; -v lists them",
        )
    for row in found["environment"]:
        unread = f": {row['meaning']}" if row["name"] not in config.VARIABLES else ""
        yield "environment", f"{row['name']}={row['value']}{unread}"


def _named(name: str, value: str) -> str:
    return value if name in ("system", "cpu") else f"{name}: {value}"


def _backend(backend: Report) -> str:
    """What a backend can do here, or the line that would make it so."""
    if backend["missing"]:
        by_remedy: dict[str, list[str]] = {}
        for row in backend["missing"]:
            by_remedy.setdefault(row["remedy"], []).append(row["what"])
        lines = [f"{', '.join(what)}; to get it: {remedy}" for remedy, what in by_remedy.items()]
        return f"{backend['status']}: {'. '.join(lines)}"
    kinds = ", ".join([_KINDS.get(kind, kind) for kind in backend["kinds"]])
    marks = {row["here"] for row in backend["ops"].values()}
    if marks == {"no device"}:
        on = sorted({arch for row in backend["ops"].values() for arch in row["verified_on"]})
        return f"installed, no device for it here ({kinds}; verified on {', '.join(on) or 'nothing yet'})"
    return f"{backend['status']}: {kinds}; {' and '.join(sorted(marks))} here"


def _selfchecks(found: Report) -> str:
    if not found["selfchecks_run"]:
        return "not run (--no-selfcheck)"
    passed = sum(row["status"] == "ok" for row in found["selfchecks"])
    return f"{passed} of {len(found['selfchecks'])} agree with the float64 oracle"
