"""Draw a record: ``python -m benchmarks.plot benchmarks/results/h200/few-heads.json few-heads.svg``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from benchmarks.by_heads import draw_by_heads
from kdacore.bench.plot import draw
from kdacore.bench.results import read


def main() -> None:
    """A bar for each contender of each case, or lines by number of heads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "record", type=Path, help="what kdacore bench or a benchmark wrote, or a current record"
    )
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument(
        "--by-heads", action="store_true", help="a line for each contender, by number of heads"
    )
    args = parser.parse_args()
    contents = of_last_run(read(args.record))
    if contents["presets"] == ["backward-segments"]:
        contents = forms_apart(contents)
    (draw_by_heads if args.by_heads else draw)(contents, args.picture)
    print(f"{args.record} -> {args.picture}")


def of_last_run(contents: dict[str, Any]) -> dict[str, Any]:
    """A current record with what its last run says at the top, as a record of one run has it."""
    return {**contents["runs"][-1], **contents} if "runs" in contents else contents


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
