"""Cost tables: shipped ones are valid, the nearest row predicts, far ones do not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import kdacore
from kdacore.dispatch import cost
from kdacore.ops import OPS
from kdacore.registry import REGISTRY
from kdacore.types import Device, Request

ROW = cost.Row("cuda", "chunk_kda", "torch", "bfloat16", False, 128, 128, 8192, 1, 64, 4e-4)
CALL = Request(
    "chunk_kda", "torch", Device("cuda", 0, "sm_x"), 1, 8192, 64, 64, 128, 128, 1, "bfloat16", "float32"
)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (ROW, dataclasses.replace(ROW, tokens=16384, seconds=6e-4))
    monkeypatch.setattr(cost, "table", {"sm_x": rows}.__getitem__)


def shipped() -> list[Path]:
    return sorted((Path(kdacore.__file__).parent / "dispatch" / "profiles").glob("*.json"))


def test_there_is_a_table_for_the_measured_gpu() -> None:
    assert "sm_90.json" in [p.name for p in shipped()]


@pytest.mark.parametrize("path", shipped(), ids=lambda p: p.name)
def test_shipped_tables_are_valid(path: Path) -> None:
    rows = cost.parse(path.read_text())
    assert rows and len(set(rows)) == len(rows)
    assert {r.backend for r in rows} <= set(REGISTRY.backends())
    assert {r.op for r in rows} <= set(OPS)
    assert all(0 < r.seconds < 10 for r in rows)


def test_text_and_rows_are_the_same() -> None:
    assert cost.parse(cost.dump((ROW,))) == (ROW,)
    with pytest.raises(ValueError, match="schema 99"):
        cost.parse('{"schema": 99, "rows": []}')


@pytest.mark.usefixtures("table")
def test_the_nearest_row_predicts() -> None:
    assert cost.predict("cuda", CALL) == pytest.approx(4e-4)
    assert cost.predict("cuda", dataclasses.replace(CALL, T=9000)) == pytest.approx(4e-4 * 9000 / 8192)
    assert cost.predict("cuda", dataclasses.replace(CALL, T=20000)) == pytest.approx(6e-4 * 20000 / 16384)
    assert cost.predict("cuda", dataclasses.replace(CALL, H=32, HV=32)) == pytest.approx(2e-4)


@pytest.mark.parametrize(
    "change", [{"T": 512}, {"HV": 8}, {"K": 64}, {"dtype": "float16"}, {"needs_grad": True}, {"kind": "jax"}]
)
@pytest.mark.usefixtures("table")
def test_nothing_near_predicts_nothing(change: dict[str, object]) -> None:
    assert cost.predict("cuda", dataclasses.replace(CALL, **change)) is None  # type: ignore[arg-type]
    assert cost.predict("triton", CALL) is None


def test_an_h200_gets_the_faster_backend_for_each_shape() -> None:
    """Measured on one: the hand-written kernels win everywhere but in decoding one sequence."""

    def faster(op: str, **sizes: Any) -> str:
        request = dataclasses.replace(CALL, op=op, device=Device("cuda", 0, "sm_90"), **sizes)  # type: ignore[arg-type]
        costs = {name: cost.predict(name, request) for name in ("cuda", "triton")}
        return min(costs, key=lambda name: costs[name] or float("inf"))

    assert faster("chunk_kda") == "cuda"
    assert faster("chunk_kda", H=8, HV=8) == "cuda"
    assert faster("chunk_kda", needs_grad=True) == "cuda"
    assert faster("chunk_kda", H=8, HV=8, needs_grad=True) == "cuda"
    assert faster("fused_recurrent_kda", B=256, N=256, T=1, H=32, HV=32) == "cuda"
    assert faster("fused_recurrent_kda", B=1, N=1, T=1, H=32, HV=32) == "triton"
