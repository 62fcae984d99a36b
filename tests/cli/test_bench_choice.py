"""The preset ``h200-choice``: what it covers, that no table was fitted on it, and how choices are judged."""

from __future__ import annotations

import dataclasses

import pytest

from kdacore.bench import cases, choice, contenders, cost_shapes, runner
from kdacore.bench.cases import PRESETS, Case
from kdacore.bench.clock import Budget
from kdacore.bench.results import Row
from kdacore.calls import requests
from kdacore.dispatch import cost, cost_tables
from kdacore.types import Request

CASES = PRESETS[choice.PRESET]
ONCE = Budget(samples=1, seconds=1.0, least=1)


def request(case: Case) -> Request:
    return requests.request_of(contenders.described(case, "cuda"))


def test_it_covers_what_models_call() -> None:
    assert len(CASES) >= 80 and len({case.name for case in CASES}) == len(CASES)
    assert {1, 256} <= {case.B for case in CASES}
    assert {1, 131072} <= {case.T for case in CASES}
    assert {2, 96} <= {case.H for case in CASES}
    assert any(case.HV for case in CASES) and any(case.lengths for case in CASES)
    assert {case.gate for case in CASES} == {"sigmoid", "softplus"}
    assert {case.phase for case in CASES} == {"forward", "training", "decode"}
    assert any(case.initial_state for case in CASES)


def test_no_table_is_measured_on_its_calls() -> None:
    """Neither the calls that tables are measured on nor those of the table that ships."""

    def key(r: Request) -> tuple[object, ...]:
        return cost.group_of(r), cost.variant_of(r), cost.tokens_of(r), r.N * r.HV

    fitted = {key(request(case)) for case in cost_shapes.cases("cuda")}
    asked = {key(request(case)): case.name for case in CASES}
    assert not fitted & set(asked)
    table = cost_tables.shipped("sm_90")
    assert table is not None
    for (_, group), variants in table.times.items():
        for variant, columns in variants.items():
            points = {(group, variant, t, items) for items, column in columns.items() for t, _ in column}
            assert not points & set(asked)


def test_backends_are_predicted_from_the_same_kind_of_calls() -> None:
    """Or none of them is: a time that was measured is not compared with one that is unknown."""
    for case in CASES:
        cuda, triton = (cost.predict(backend, request(case)) for backend in ("cuda", "triton"))
        assert (cuda and cuda.source) == (triton and triton.source), case.name


@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: case.name)
def test_its_cases_run_small(case: Case) -> None:
    found = runner.run_case(choice.PRESET, cases.tiny(case), "init", "cpu", ("reference",), ONCE)
    assert found.rows[0].status == "ok", found.rows[0].note


def rows(case: str, times: dict[str, float | None], chosen: str) -> list[Row]:
    return [
        Row(preset=choice.PRESET, case=case, phase="forward", contender=f"kdacore {name}", backend=name, gates="init",
            status="ok" if seconds else "skipped", seconds=seconds, auto=name == chosen)
        for name, seconds in times.items()
    ]  # fmt: skip


def test_choices_are_judged_by_the_fastest() -> None:
    given = [
        *rows("right", {"cuda": 1.0, "triton": 2.0}, "cuda"),
        *rows("alike", {"cuda": 1.04, "triton": 1.0}, "cuda"),
        *rows("wrong", {"cuda": 1.5, "triton": 1.0}, "cuda"),
        *rows("alone", {"cuda": 1.5, "triton": None}, "cuda"),
        *rows("untimed", {"cuda": None, "triton": 1.0}, "cuda"),
    ]
    right, alike, wrong, share, worst = choice.figures(given)
    assert (right.value, alike.value, wrong.value) == (1.0, 1.04, 1.5)
    assert wrong.name == "wrong: cuda chosen, triton fastest" and wrong.met is False and alike.met
    assert share.value == pytest.approx(200 / 3) and share.met is False and "of 3 calls" in share.name
    assert worst.value == 1.5 and worst.met is False and worst.note == wrong.name
    *_, share, worst = choice.figures(given[:4])
    assert (share.value, share.met, worst.value, worst.met) == (100.0, True, 1.04, True)


def test_rows_of_other_presets_and_peers_are_no_choices() -> None:
    given = rows("one", {"cuda": 1.0, "triton": 2.0}, "cuda")
    other = [dataclasses.replace(row, preset="h200-forward") for row in given]
    peers = [dataclasses.replace(row, contender="fla-core 0.6.0") for row in given]
    assert choice.figures([*other, *peers]) == []


@pytest.mark.usefixtures("every_backend")
def test_what_is_predicted_to_take_long_is_not_timed() -> None:
    case = dataclasses.replace(CASES[0], longest=0.0, B=1, T=2048, H=64)
    refusals = {c.name: c.refusal for c in contenders.kdacore_contenders(case, "cuda", ("triton",))}
    assert refusals == {"kdacore triton": "predicted to take longer than 0 ms"}
