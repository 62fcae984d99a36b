"""A row on 2 to 64 GPUs, on paper: ``python -m benchmarks.context_parallel_model`` writes the table of
docs/guide/long-context.md and draws its picture.

The time of a rank is its share of the work, the exchange, and the fold of the other ranks' maps. The work is measured
on two and four H100s, the exchange on two; what is assumed says so. Points measured on several GPUs, where
there are any in benchmarks/results, are printed beside the model's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bar_charts import Bar, Group, draw

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "context-parallel-model.svg"

RANKS = (2, 4, 8, 16, 32, 64)
TOKENS = (65536, 262144, 1048576)
HEADS = 16


@dataclass(frozen=True)
class Pass:
    """What one pass of the model costs, at 16 heads of 128 channels in bfloat16, as measured on H100s."""

    name: str
    alone: float
    """Seconds for a token of one head in a plain call."""
    sliced: float
    """The same in a slice, without the exchange."""
    fixed: float
    """Seconds that a call takes however short its row."""
    gathered: int
    """Bytes that a rank sends for each head."""
    collectives: int


STATE = 128 * 128 * 4
FORWARD = Pass("forward", 1.58e-9, 1.58e-9, 30e-6, 2 * STATE, 1)
TRAINING = Pass("forward + backward", 5.66e-9, 5.75e-9, 80e-6, 3 * STATE, 2)

RATE, START = 75e9, 18e-6
"""Bytes per second that a GPU receives in a gather of a few MiB, and seconds before it moves anything: measured between
two H100s of one host, and assumed for any number of GPUs. Between four, 16 heads' maps take two thirds of what this
says."""
GPUS_OF_A_HOST = 8
HOP = 5e-6
"""Seconds more for each further host. Assumed."""
FOLD = 10e-6
"""Seconds for each rank whose map is applied: a product of a transition and a state for each head. Measured on one
H100 with two; assumed for more."""


def seconds(on: Pass, T: int, heads: int, ranks: int) -> float:
    """Seconds of a row of T tokens on so many GPUs."""
    if ranks == 1:
        return on.fixed + on.alone * T * heads
    start = START + HOP * (ranks // GPUS_OF_A_HOST if ranks > GPUS_OF_A_HOST else 0)
    exchange = (ranks - 1) * on.gathered * heads / RATE + on.collectives * start
    work = on.fixed + on.sliced * (T // ranks) * heads
    return work + exchange + on.collectives * (ranks - 1) * FOLD


def table(heads: int = HEADS) -> str:
    """Milliseconds, and how many times as fast as one GPU, as a Markdown table."""
    lines = [
        f"| ms, {heads} heads (times as fast) | 1 | " + " | ".join(map(str, RANKS)) + " |",
        "|---" * (len(RANKS) + 2) + "|",
    ]
    for on in (FORWARD, TRAINING):
        for T in TOKENS:
            one = seconds(on, T, heads, 1)
            cells = []
            for ranks in RANKS:
                taken = seconds(on, T, heads, ranks)
                cells.append(f"{taken * 1e3:.2f} ({one / taken:.1f})")
            lines.append(f"| {on.name}, T {T} | {one * 1e3:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def stops_paying(on: Pass, T: int, heads: int = HEADS) -> int:
    """The largest number of GPUs, of those in the table, on which doubling them still gains a quarter."""
    best, before = 1, seconds(on, T, heads, 1)
    for ranks in RANKS:
        taken = seconds(on, T, heads, ranks)
        if taken > before / 1.25:
            break
        best, before = ranks, taken
    return best


def picture(heads: int = HEADS) -> str:
    """SVG text: times as fast as one GPU."""
    groups = []
    for on in (FORWARD, TRAINING):
        for T in TOKENS:
            one = seconds(on, T, heads, 1)
            bars = []
            for ranks in RANKS:
                taken = seconds(on, T, heads, ranks)
                series = "one host" if ranks <= GPUS_OF_A_HOST else "several hosts"
                label = f"{ranks} GPUs: {one / taken:.1f}x, {taken * 1e3:.2f} ms"
                bars.append(Bar(series, max(1.0, one / taken), label))
            groups.append(Group(f"{on.name}, T {T // 1024}k", tuple(bars)))
    return draw(f"Model from two and four H100s: {heads} heads, one row, times as fast as one H100", groups)


def measured() -> list[str]:
    """Lines of measured points, from the records of ``benchmarks.context_parallel``."""
    lines = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/context-parallel*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        lines += [
            f"{path.name}: {row['case']}, {row['contender']}: {row['seconds'] * 1e3:.2f} ms"
            for row in rows
            if row.get("seconds") and row["contender"].split()[0] in ("one", "ranks")
        ]
    return lines


PAGE = ROOT / "docs" / "guide" / "long-context.md"
_BEGIN, _END = "<!-- model:begin -->", "<!-- model:end -->"


def page(text: str) -> str:
    """The guide with the table in its place."""
    before, rest = text.split(_BEGIN)
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{rest.split(_END)[1]}"


def main() -> None:
    print(table())
    for on in (FORWARD, TRAINING):
        for T in TOKENS:
            print(f"{on.name}, T {T}: doubling pays up to {stops_paying(on, T)} GPUs")
    print(*measured(), sep="\n")
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
