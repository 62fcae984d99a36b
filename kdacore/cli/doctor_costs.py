"""The doctor's rows on cost tables: which there are, which automatic choice uses here, and why it uses no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdacore.dispatch import cost_tables
from kdacore.dispatch.cost_tables import Table
from kdacore.machine import Machine, cpu_name

Row = dict[str, Any]
AGAIN = "`kdacore tune` measures it again"


def rows(where: Machine, problem: Callable[[str, str], None]) -> list[Row]:
    """One a table: those that ``kdacore tune`` wrote, then those that ship."""
    here = {(a.arch, a.name) for a in where.accelerators if a.kind == "torch"} | {("", cpu_name())}
    own = list(cost_tables.own_tables())
    found = []
    for one in own:
        if one.table is None:
            if one.damaged:
                problem(f"cost table {one.path}", f"{one.problem}; it is ignored. {AGAIN}")
            found.append(_row(str(one.path), None, f"ignored: {one.problem}. {AGAIN}"))
        else:
            used = (one.table.arch, one.table.device) in here
            status = "used" if used else f"not used: no {one.table.device} here"
            found.append(_row(str(one.path), one.table, status))
    measured = {(t.arch, t.device) for one in own if (t := one.table) is not None}
    for arch in cost_tables.shipped_archs():
        users = sorted(name for a, name in here - measured if (a or cost_tables.CPU) == arch)
        table = cost_tables.shipped(arch)
        status = f"used for {', '.join(users)}" if users else "not used here"
        found.append(_row(f"shipped for {'CPUs' if arch == cost_tables.CPU else arch}", table, status))
    return found


def _row(table: str, contents: Table | None, status: str) -> Row:
    measured = {"device": contents.device, "when": contents.when} if contents else {"device": "", "when": ""}
    return {"table": table, **measured, "status": status}
