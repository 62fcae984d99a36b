"""Steps of serving engines with kdacore and without: ``python -m benchmarks.engine_times`` writes the table of
docs/guide/serving-engines.md and its picture from ``benchmarks/results/h200/engine-steps.json``; ``--check`` exits 1
where they are not what it would write.

A run in the record is an engine with one set of kernels: wall-clock milliseconds of its steps, samples of several
processes that measured in turn with those of the other set, and microseconds of GPU time by kernel from a profile of a
step. What a layer computes between its projections is found by the kernels' names.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.bar_charts import Bar, Group, draw
from benchmarks.performance_page import fill

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "results" / "h200" / "engine-steps.json"
PAGE = ROOT / "docs" / "guide" / "serving-engines.md"
PICTURE = ROOT / "docs" / "images" / "h200-engine-steps.svg"

BETWEEN_PROJECTIONS = re.compile(
    r"conv1d|kda|delta|gdn|recurrent|chunk_|merge_16x16|recompute_w_u|l2norm|post_conv|gather_initial|index_put"
    r"|layer_norm|^decode|^walk_|^prepare|^scan",
    re.IGNORECASE,
)
"""Kernels of convolution, delta rule and gated norm, and those that move states."""
Run = dict[str, Any]


def between_projections(kernels: dict[str, float]) -> float:
    """Microseconds of GPU time of a step's convolutions, delta rules and gated norms."""
    return sum(us for name, us in kernels.items() if BETWEEN_PROJECTIONS.search(name))


def pairs(runs: list[Run]) -> list[tuple[Run, Run]]:
    """The run of each engine's own kernels and that with kdacore, by model."""
    found: dict[tuple[str, str], dict[str, Run]] = {}
    for run in runs:
        found.setdefault((run["engine"], run["model"]), {})[run["kernels"]] = run
    return [(both["own"], both["kdacore"]) for both in found.values() if len(both) == 2]


def _samples(run: Run, step: str) -> list[float]:
    return [ms for process in run["ms"][step] for ms in process]


def _span(samples: list[float]) -> str:
    return f"{statistics.median(samples):.3g} [{min(samples):.3g} to {max(samples):.3g}]"


def _faster(theirs: list[float], ours: list[float]) -> str:
    """The ratio of the medians, and whether the ranges of all samples overlap."""
    ratio = f"{statistics.median(theirs) / statistics.median(ours):.2f}x"
    apart = max(ours) < min(theirs) or max(theirs) < min(ours)
    return f"**{ratio}**" if apart else f"{ratio}, ranges overlap"


def table(runs: list[Run]) -> str:
    lines = [
        "| model | step | between the projections, GPU ms: vLLM, kdacore | whole step, GPU time "
        "| wall clock, ms: vLLM | kdacore | |",
        "|---|---|---|---|---|---|---|",
    ]
    for own, ours in pairs(runs):
        for step, kernels in own["us"].items():
            theirs, mine = between_projections(kernels), between_projections(ours["us"][step])
            whole = sum(kernels.values()) / sum(ours["us"][step].values())
            passed = _samples(own, step), _samples(ours, step)
            lines.append(
                f"| {own['model']} | {step} | {theirs / 1e3:.3g}, {mine / 1e3:.3g}: **{theirs / mine:.2f}x** "
                f"| {whole:.2f}x | {_span(passed[0])} | {_span(passed[1])} | {_faster(*passed)} |"
            )
    return "\n".join(lines)


def picture(runs: list[Run]) -> str:
    groups = []
    for own, ours in pairs(runs):
        for step, kernels in own["us"].items():
            times = {
                "vLLM": between_projections(kernels),
                "kdacore": between_projections(ours["us"][step]),
            }
            least = min(times.values())
            bars = [
                Bar(name, us / least, f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.0f} us")
                for name, us in times.items()
            ]
            groups.append(Group(f"{own['model']}, {step}", tuple(bars)))
    return draw(
        "Convolution, delta rule and gated norm inside vLLM 0.33.0, one H200: GPU time of a step", groups
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page differs")
    args = parser.parse_args()
    runs = json.loads(RECORD.read_text())["runs"]
    made = {
        PAGE: fill(PAGE.read_text(), "engine-steps", f"{table(runs)}\n"),
        PICTURE: picture(runs),
    }
    if args.check:
        wrong = [str(p.relative_to(ROOT)) for p, text in made.items() if p.read_text() != text]
        for name in wrong:
            print(f"{name} is not what the record gives: python -m benchmarks.engine_times")
        return 1 if wrong else 0
    for path, text in made.items():
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
