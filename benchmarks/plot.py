"""Draw docs/images/*.svg from the committed results: ``python -m benchmarks.plot`` in the checkout."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.by_heads import draw_by_heads
from kdacore.bench.plot import draw
from kdacore.bench.results import read

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """One picture for each results file with something to compare."""
    for source in sorted((ROOT / "benchmarks" / "results").glob("*/*.json")):
        record = json.loads(source.read_text(encoding="utf-8"))
        if record.get("rows") and all("before" in row for row in record["rows"]):
            contents = before_and_after(record)
        elif record.get("presets") == ["context-parallel"]:
            continue  # drawn as ratios by benchmarks.context_parallel.picture
        elif "presets" in record:
            contents = read(source)
            if record["presets"] == ["backward-segments"]:
                contents = forms_apart(contents)
        else:
            continue  # a record of something else than kdacore bench
        timed = [row for row in contents["rows"] if row["seconds"] is not None]
        if len(timed) < 2:
            continue
        picture = ROOT / "docs" / "images" / f"{source.parent.name}-{source.stem}.svg"
        if "few-heads-forms" in source.stem:
            draw_by_heads(contents, picture)
        else:
            draw(contents, picture)
        print(f"{source.relative_to(ROOT)} -> {picture.relative_to(ROOT)}")


def before_and_after(record: dict[str, Any]) -> dict[str, Any]:
    """Rows that hold both times of a change as two contenders; those without a bound on their gates are left out."""
    rows = []
    for row in record["rows"]:
        if "unbounded" not in row["case"]:
            rows.append({**row, "contender": "before", "seconds": row["before"], "gates": ""})
            rows.append({**row, "contender": "after", "gates": ""})
    return {"rows": rows, "machine": {"cpu": record["machine"]}}


def forms_apart(contents: dict[str, Any]) -> dict[str, Any]:
    """The launches of one form, which the contender names first, as a case: colours are then those of launches."""
    rows = []
    for row in contents["rows"]:
        form, launch = row["contender"].split(" ", 1)
        said = re.sub(r"segments-of-(\d+)", r"segments of \1 chunks", form)
        rows.append({**row, "case": f"{row['case']}, {said}", "contender": launch})
    return {**contents, "rows": rows}


if __name__ == "__main__":
    main()
