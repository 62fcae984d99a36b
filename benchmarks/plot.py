"""Draw docs/images/*.svg from the committed results: ``python -m benchmarks.plot`` in the checkout."""

from __future__ import annotations

import json
from pathlib import Path

from kdacore.bench.plot import draw
from kdacore.bench.results import read

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """One picture for each results file with something to compare."""
    for source in sorted((ROOT / "benchmarks" / "results").glob("*/*.json")):
        if "presets" not in json.loads(source.read_text(encoding="utf-8")):
            continue  # a record of something else than kdacore bench
        contents = read(source)
        timed = [row for row in contents["rows"] if row["seconds"] is not None]
        if len(timed) < 2:
            continue
        picture = ROOT / "docs" / "images" / f"{source.parent.name}-{source.stem}.svg"
        draw(contents, picture)
        print(f"{source.relative_to(ROOT)} -> {picture.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
