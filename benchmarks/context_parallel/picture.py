"""A record as a picture, times as fast as one GPU: ``python -m benchmarks.context_parallel.picture``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.bar_charts import Bar, Group, draw

SERIES = {"ranks": "kdacore", "fla": "fla-core"}


def picture(document: dict[str, Any]) -> str:
    """SVG text: for each case and pass, one GPU's time over that of all ranks."""
    seconds = {(r["case"], r["contender"]): r["seconds"] for r in document["rows"]}
    gpus = next(r["shape"].split(", ")[-1].split()[0] for r in document["rows"] if ", " in r["shape"])
    groups = []
    for case in dict.fromkeys(r["case"] for r in document["rows"]):
        for phase in ("forward", "training"):
            one = seconds.get((case, f"one {phase}"))
            bars = []
            for whose, series in SERIES.items():
                taken = seconds.get((case, f"{whose} {phase}"))
                if one and taken:
                    bars.append(
                        Bar(series, max(1.0, one / taken), f"{one / taken:.2f}x, {1e3 * taken:.2f} ms")
                    )
            if bars:
                groups.append(Group(f"{case}, {phase}", tuple(bars)))
    return draw(f"{gpus} GPUs beside kdacore on one: times as fast", groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    args.picture.write_text(picture(json.loads(args.record.read_text())))


if __name__ == "__main__":
    main()
