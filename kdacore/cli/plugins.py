"""``kdacore plugins``: every plugin found, where it comes from, and what it brings."""

from __future__ import annotations

import argparse

from kdacore import report
from kdacore.registry import REGISTRY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    """1 when a plugin has a problem."""
    out = report.console()
    records = REGISTRY.plugins()
    rows = [
        (
            p.name,
            p.distribution,
            "disabled" if p.disabled else "problem" if p.problem else "ok",
            f"{p.seconds * 1e3:.1f} ms",
            ", ".join(p.backends) or "-",
        )
        for p in records
    ]
    out.print(report.table(("plugin", "distribution", "status", "import", "backends"), rows, out), end="")
    for p in records:
        if p.problem:
            out.print(f"\n  {p.name}: {p.problem}")
    out.print()
    infos = {name: r.backend for name, r in REGISTRY.backends().items()}
    backends = [(name, b.version, ", ".join(b.kinds)) for name, b in infos.items()]
    out.print(report.table(("backend", "version", "takes"), backends, out), end="")
    out.print()
    for name, b in infos.items():
        out.print(report.hanging(f"  {name}: ", ", ".join(b.ops), out))
    return report.BROKEN if any(p.problem for p in records) else report.OK
