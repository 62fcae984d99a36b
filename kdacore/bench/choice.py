"""How good automatic choice is: the backend it takes against our fastest, case by case."""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.bench.results import Figure, Row

PRESET = "h200-choice"
ALIKE = 1.05
SHARE = 0.95
"""Share of the calls that have to take the fastest backend, or one within :data:`ALIKE` of it."""
WORST = 1.2
"""No call may take longer than this many times the fastest."""


def figures(rows: Iterable[Row]) -> list[Figure]:
    """One figure a case that several backends were timed in, then the share and the worst of them."""
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.preset == PRESET and row.contender.startswith("kdacore "):
            cases.setdefault((row.case, row.phase, row.gates), []).append(row)
    found = [figure for contest in cases.values() if (figure := _ratio(contest)) is not None]
    if not found:
        return []
    share = sum(figure.value <= ALIKE for figure in found) / len(found)
    worst = max(found, key=lambda figure: figure.value)
    return [
        *found,
        Figure(
            preset=PRESET,
            name=f"choices within {ALIKE - 1:.0%} of the fastest backend, of {len(found)} calls",
            value=100 * share,
            unit="%",
            want=f">= {100 * SHARE:g} %",
            met=share >= SHARE,
        ),
        Figure(
            preset=PRESET,
            name="worst choice",
            value=worst.value,
            unit="x",
            want=f"<= {WORST:g} x",
            met=worst.value <= WORST,
            note=worst.name,
        ),
    ]


def _ratio(contest: list[Row]) -> Figure | None:
    """None where there was nothing to choose between, or the backend chosen was not timed."""
    timed = [(row.seconds, row) for row in contest if row.seconds is not None]
    chosen = next((pair for pair in timed if pair[1].auto), None)
    if len(timed) < 2 or chosen is None:
        return None
    best = min(timed, key=lambda pair: pair[0])
    ratio = chosen[0] / best[0]
    row = chosen[1]
    return Figure(
        preset=PRESET,
        name=f"{row.case}: {row.backend} chosen, {best[1].backend} fastest",
        value=ratio,
        unit="x",
        want=f"<= {WORST:g} x",
        met=ratio <= WORST,
    )
