"""The real TPU compiler, with no TPU: ``pip install '.[pallas-tpu]'`` brings it, else this is
skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdacore_pallas.tpu import compiler, vmem

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = json.loads((ROOT / "benchmarks/results/tpu-compiler/report.json").read_text())["rows"]
KEPT = ("forward, starts kept", "backward from kept starts")
WANTED = {f"{what}{where}" for what in ("forward", "backward", "decode") for where in ("", ", 4 chips")} | {
    *KEPT
}


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; to get it: pip install '.[pallas-tpu]'",
)
def test_the_report_of_one_generation(tmp_path: Path) -> None:
    """A process of its own, without this folder's flags: the compiler reads its settings once."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "kdacore_pallas.tpu.report", "--generations", "v5e", "--out", str(out)]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    assert {row["what"] for row in json.loads(out.read_text())["rows"]} == {*WANTED, "forward variant"}


@pytest.mark.parametrize("generation", compiler.TOPOLOGIES)
def test_the_committed_report(generation: str) -> None:
    """Every kernel, alone and on four chips, with what was asked of it."""
    rows = {r["what"]: r for r in COMMITTED if r["generation"] == generation and "chunk" not in r}
    assert set(rows) == WANTED
    for row in rows.values():
        assert row["code_bytes"] > 0 and row["spill_stores"] >= 0 and row["bundles_by_depth"]
    assert rows["forward"]["hbm_bytes_per_token_head"] <= 1.3 * rows["forward"]["least_bytes_per_token_head"]
    for what in ("forward", "backward", "decode", *KEPT):
        assert rows[what]["vmem_need_bytes"] <= vmem.VMEM[generation]
    for what in ("forward", "backward", "decode"):
        assert rows[f"{what}, 4 chips"]["collectives"] == 0
