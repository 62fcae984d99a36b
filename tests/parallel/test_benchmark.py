"""``benchmarks.context_parallel``: its checks can fail, its figures are what rows say."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks.context_parallel import check, command, picture, rows
from benchmarks.context_parallel.ranks import Rank
from benchmarks.context_parallel.rows import RowCase
from kdacore.bench.clock import Timing
from kdacore.parallel import local_group


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[RowCase], dict[str, float]]:
    """The check of a row against the oracle, ranks as threads."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    group = local_group(2)

    def checked(case: RowCase) -> dict[str, float]:
        def one(rank: int) -> dict[str, float]:
            with torch.autograd.set_multithreading_enabled(False):
                this = Rank(rank, 2, group[rank], "cpu", group[rank].exchange, True)
                return check.check(this, case, "oracle")

        with ThreadPoolExecutor(2) as pool:
            return next(iter(pool.map(one, range(2))))

    return checked


CASE = RowCase("kda", 96, 1, (0, 40, 0, 47))


def test_a_row_in_two_parts(on_the_cpu: Callable[[RowCase], dict[str, float]]) -> None:
    assert {"o", "final_state", "dq", "dg", "dA_log", "dinitial_state"} <= set(on_the_cpu(CASE))


def test_a_state_that_is_lost_between_ranks_is_found(
    on_the_cpu: Callable[[RowCase], dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = rows.call

    def lost(case: RowCase, x: dict[str, Any], cp: Any = None, final: bool = True) -> Any:
        return plain(case, x, None if cp is None else local_group(1)[0], final)

    monkeypatch.setattr(rows, "call", lost)
    with pytest.raises(AssertionError, match="against oracle"):
        on_the_cpu(RowCase("kda", 96, 1))


def test_lengths_of_a_pack() -> None:
    lengths = rows.lengths_of_a_pack(65536)
    assert sum(lengths) == 65536
    assert min(lengths) > 0
    assert lengths == rows.lengths_of_a_pack(65536)


def test_figures_and_picture() -> None:
    case = RowCase("kda", 262144, 16)
    made = [
        command.row(case, 2, name, Timing(seconds, seconds, seconds, 3))
        for name, seconds in (
            ("one forward", 6e-3), ("ranks forward", 3e-3), ("one training", 20e-3), ("ranks training", 16e-3)
        )
    ]  # fmt: skip
    figures = command.speedups(made, 2)
    assert [(round(f.value, 3), f.met) for f in figures] == [(2.0, True), (1.25, False)]
    rows_of_record = [
        {"case": r.case, "contender": r.contender, "seconds": r.seconds, "shape": r.shape} for r in made
    ]
    drawn = picture.picture({"rows": rows_of_record})
    assert "2.00x, 3.00 ms" in drawn
    assert "2 GPUs" in drawn
