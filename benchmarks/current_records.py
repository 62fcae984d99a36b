"""Put a benchmark's rows into the current record of its preset: ``python -m benchmarks.current_records out.json h200``.

There is one record for each preset and machine, ``benchmarks/results/<machine>/<preset>.json``. A new row replaces that
of the same case, phase, shape and contender, whatever the contender's version; a row that was skipped replaces none.
``runs`` says when, where and on which commit rows were measured, and each row names its run. A run that no row names
any more leaves the record; git's history has it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from kdacore.bench import results
from kdacore.bench.cases import PRESETS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OF_RUN = ("when", "commit", "machine", "versions", "scheduling", "load_average", "note")
"""What a record says of a run as a whole."""

Record = dict[str, Any]
Key = tuple[str, ...]


def key_of(row: Record) -> Key:
    """Rows of one key replace each other; rows of both gate sets have the same one."""
    contender = re.sub(r" \d+\.[\w.+]+$", "", row["contender"])
    return row["case"], row["phase"], row.get("shape", ""), contender


def is_timed(row: Record) -> bool:
    """Whether a row may replace an earlier one."""
    return row["status"] in ("ok", "wrong", "FAILED")


def merged(record: Record | None, new: Record, preset: str) -> Record:
    """The record of a preset with the rows and figures that ``new`` has of it."""
    earlier = _runs_of(record, preset)
    runs, rows, figures = list(earlier["runs"]), list(earlier["rows"]), list(earlier["figures"])
    number = len(runs)
    fresh = [{**row, "run": number} for row in new["rows"] if row["preset"] == preset]
    runs.append(_run_of(new, with_rows=bool(fresh)))
    replaced = {key_of(row) for row in fresh if is_timed(row)}
    known = {key_of(row) for row in rows}
    rows = [row for row in rows if key_of(row) not in replaced]
    rows += [row for row in fresh if is_timed(row) or key_of(row) not in known]
    said = {figure["name"] for figure in new["figures"] if figure["preset"] == preset}
    figures = [figure for figure in figures if figure["name"] not in said]
    figures += [{**figure, "run": number} for figure in new["figures"] if figure["preset"] == preset]
    return _renumbered(preset, runs, _by_case(preset, rows), figures)


def _run_of(record: Record, with_rows: bool) -> Record:
    return {name: record[name] for name in OF_RUN if name in record} | {"with_rows": with_rows}


def _runs_of(record: Record | None, preset: str) -> Record:
    """The runs of a record, their rows and figures: none, or one of a file as a benchmark writes it."""
    if record is None:
        return {"runs": [], "rows": [], "figures": []}
    if "runs" in record:
        return record
    rows, figures = (
        [{**x, "run": 0} for x in record[of] if x["preset"] == preset] for of in ("rows", "figures")
    )
    return {"runs": [_run_of(record, bool(rows))], "rows": rows, "figures": figures}


def _by_case(preset: str, rows: list[Record]) -> list[Record]:
    """Rows of a case next to each other, cases in the order of the preset, others in that of their first rows."""
    names = [case.name for case in PRESETS.get(preset, ())] + [row["case"] for row in rows]
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return sorted(rows, key=lambda row: order[row["case"]])


def _renumbered(preset: str, runs: list[Record], rows: list[Record], figures: list[Record]) -> Record:
    """The record without the runs of which nothing is left. Figures of a run that had rows say something of these, and
    go with the last of them."""
    alone = [f["run"] for f in figures if not runs[f["run"]].get("with_rows", True)]
    used = sorted({*alone, *[row["run"] for row in rows]})
    place = {number: i for i, number in enumerate(used)}
    return {
        "schema": results.SCHEMA,
        "presets": [preset],
        "runs": [runs[number] for number in used],
        "rows": [{**row, "run": place[row["run"]]} for row in rows],
        "figures": [{**f, "run": place[f["run"]]} for f in figures if f["run"] in place],
    }


def update(path: Path, machine: str, folder: Path = RESULTS) -> list[Path]:
    """Merge one file that ``kdacore bench --json`` or a benchmark wrote; the records that changed.

    Raises:
        ValueError: the file is not a record of this version.
        OSError: it cannot be read, or a record cannot be written.
    """
    new, written = results.read(path), []
    for preset in dict.fromkeys(x["preset"] for x in (*new["rows"], *new["figures"])):
        target = folder / machine / f"{preset}.json"
        before = results.read(target) if target.exists() else None
        results.write(target, merged(before, new, preset))
        written.append(target)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, nargs="+", help="what a benchmark wrote, the earliest first")
    parser.add_argument("machine", help="the folder of the machine: h200, h100, cpu")
    args = parser.parse_args()
    for path in args.record:
        try:
            written = update(path, args.machine)
        except (OSError, ValueError, json.JSONDecodeError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        for target in written:
            print(f"{path.name}: into {target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
