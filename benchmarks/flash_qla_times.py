"""Make the package's table of what FlashQLA computes faster: ``python -m benchmarks.flash_qla_times``.

The table is ``kdacore/integrations/flash_qla_times.json``, which the integration of flash-linear-attention reads. It
has the calls of the committed records that FlashQLA and kdacore were both timed on, with the log decay and beta given:
flash-linear-attention hands only such calls to FlashQLA. ``--check`` writes nothing, and fails if the table differs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import packaged_table
from kdacore.bench.cases import PRESETS
from kdacore.bench.runner import shape
from kdacore.integrations.flash_qla_times import FILE, OP

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TABLE = ROOT / "kdacore" / "integrations" / FILE
SCHEMA = 1
PEER = "flash-qla "
OURS = "kdacore "
PHASES = ("forward", "training")
DIGITS = 4
"""Significant digits of a time; quartiles are further apart."""

Record = dict[str, Any]


def table(folder: Path = RESULTS) -> str:
    """The table's text, from the records in ``folder``.

    Raises:
        ValueError: a record has a row of FlashQLA without what is needed beside it.
    """
    calls = [call for path in sorted(folder.glob("*/*.json")) for call in _calls(path, folder)]
    lines = ",\n".join(f"  {json.dumps(call)}" for call in calls)
    listed = f"[\n{lines}\n]" if lines else "[]"
    return f'{{"schema": {SCHEMA}, "calls": {listed}}}\n'


def _calls(path: Path, folder: Path) -> Iterator[Record]:
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = record.get("rows", []) if isinstance(record, dict) else []
    for row in rows:
        if not isinstance(row, dict) or not str(row.get("contender", "")).startswith(PEER):
            continue
        case = next((c for c in PRESETS.get(row["preset"], ()) if c.name == row["case"]), None)
        if case is None:
            raise ValueError(f"{path}: preset {row['preset']} has no case {row['case']!r}")
        if row["shape"] != shape(case):
            raise ValueError(f"{path}: {row['case']} was measured with {row['shape']}; wanted {shape(case)}")
        if row["seconds"] is None or case.op != OP or case.gate_inside or row["phase"] not in PHASES:
            continue
        yield {
            "arch": _arch(path, record, row),
            "phase": row["phase"],
            "dtype": row["dtype"],
            "N": case.N,
            "tokens": case.B * case.T,
            "H": case.H,
            "HV": case.value_heads,
            "gates": row["gates"],
            "kdacore": _rounded(_ours(path, rows, row)),
            "flash_qla": _rounded(row["seconds"]),
            "version": row["contender"].removeprefix(PEER),
            "record": path.relative_to(folder).as_posix(),
        }


def _ours(path: Path, rows: list[Record], peer: Record) -> float:
    """Seconds of the backend that automatic choice took in the same case."""
    same = ("preset", "case", "phase", "gates", "shape")
    times: list[float] = [
        row["seconds"]
        for row in rows
        if row["contender"].startswith(OURS) and row["auto"] and row["seconds"] is not None
        if all(row[name] == peer[name] for name in same)
    ]
    if not times:
        raise ValueError(f"{path}: {peer['case']}, {peer['gates']}: no time of the backend that auto takes")
    return min(times)


def _arch(path: Path, record: Record, row: Record) -> str:
    """The architecture of the GPU the row was measured on."""
    run = record["runs"][row["run"]] if "runs" in record else record
    found = re.search(r"\((\w+), ", run["machine"].get("torch", ""))
    if found is None:
        raise ValueError(f"{path}: the record does not say which GPU torch saw")
    return found[1]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def main() -> int:
    return packaged_table.main(__doc__, lambda: table(), TABLE, ROOT)


if __name__ == "__main__":
    sys.exit(main())
