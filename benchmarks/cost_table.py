"""Write the cost table of an architecture from bench records: ``python -m benchmarks.cost_table sm_90 FILE...``.

Dispatch reads the table (``kdacore/dispatch/profiles/<arch>.json``) to choose among the backends that can serve a call.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from kdacore.bench.cases import PRESETS, Case
from kdacore.dispatch import cost

ROOT = Path(__file__).resolve().parent.parent
PHASES = {"forward": False, "training": True, "decode": False}
"""Phases whose rows are costs of a call, and whether gradients are asked for."""


def rows_of(records: list[dict[str, Any]]) -> tuple[cost.Row, ...]:
    """One row a case and backend: the mean of the gate sets, bounded gates only (the table knows no other).

    A later record replaces what earlier ones say of the same case and backend.
    """
    cases = {(c.name, c.phase): c for preset in PRESETS.values() for c in preset}
    seconds: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        measured: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for row in record["rows"]:
            ours = row["contender"].startswith("kdacore ") and row["seconds"] is not None
            if ours and row["phase"] in PHASES and (row["case"], row["phase"]) in cases:
                measured[row["case"], row["phase"], row["backend"]].append(row["seconds"])
        seconds |= measured
    found = []
    for (name, phase, backend), times in seconds.items():
        case = cases[name, phase]
        if case.gate == "sigmoid" and not case.disable_recompute:
            found.append(_row(case, backend, statistics.mean(times)))
    return tuple(found)


def _row(case: Case, backend: str, seconds: float) -> cost.Row:
    return cost.Row(
        backend=backend,
        op=case.op,
        kind=case.kind,
        dtype=case.dtype,
        grad=PHASES[case.phase],
        K=case.K,
        V=case.V,
        tokens=case.B * case.T,
        sequences=case.N,
        heads=case.value_heads,
        seconds=float(f"{seconds:.4g}"),
    )


def main() -> None:
    """Read the records named on the command line, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch", help="sm_90, cpu, ...")
    parser.add_argument(
        "records", nargs="+", type=Path, help="files of kdacore bench --json, or with rows like theirs"
    )
    asked = parser.parse_args()
    if not re.fullmatch(r"\w+", asked.arch):
        parser.error(f"arch {asked.arch!r}: wanted a name such as sm_90")
    rows = rows_of([json.loads(path.read_text(encoding="utf-8")) for path in asked.records])
    target = ROOT / "kdacore" / "profiles" / f"{asked.arch}.json"
    target.write_text(cost.dump(rows), encoding="utf-8")
    print(f"{len(rows)} rows -> {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
