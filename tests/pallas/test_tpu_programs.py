"""What the TPU compiler makes of callers' programs: the committed report, and that it is still true."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kdacore_pallas import tpu_programs as tp
from kdacore_pallas.tpu import compiler

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = json.loads((ROOT / "benchmarks/results/tpu-compiler/programs.json").read_text())
Row = dict[str, Any]


def by_program(report: dict[str, Any]) -> dict[tp.Program, Row]:
    return {tp.Program(*(row[n] for n in tp.Program._fields)): row for row in report["rows"]}


def check_limits(program: tp.Program, row: Row) -> None:
    """What a short call of ``xla`` may cost: before its programs were written for TPUs this took
    16 s, 27 MB of code and 0.8 GB of temporaries."""
    if program.backend == "xla" and "T256 H2" in program.shape:
        # The compiler for v5p keeps none of these loops' arrays in VMEM: 14 times, which is 7 MB.
        times = 14 if program.generation == "v5p" else 3
        assert row["code_bytes"] < 5e6 and row["temp_hbm_bytes"] <= times * row["argument_bytes"]


def test_the_committed_report() -> None:
    """Every program, on both backends; what is refused has a reason, and nothing is gathered."""
    rows = by_program(COMMITTED)
    assert list(rows) == tp.programs()
    for program, row in rows.items():
        if "refused" in row:
            assert program.backend in row["refused"] or "compiler" in row["refused"], row
            continue
        assert row["code_bytes"] > 0 and row["temp_hbm_bytes"] >= 0
        assert row.get("collectives", 0) == 0
        check_limits(program, row)
        if program.backend == "xla" and "T256 H2" in program.shape:
            assert row["compile_s"] < 3, row
    assert not [row for row in COMMITTED["rows"] if row["backend"] == "xla" and "refused" in row]


@pytest.mark.parametrize("kind", ["", ", flat"])
@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_packs_need_no_more_memory_than_dense_calls(kind: str, what: str) -> None:
    """Of equal size, but for the last states of each sequence, which a gradient's program does not return."""
    rows = by_program(COMMITTED)
    pack, dense = (rows[tp.Program(n + kind, what, "pallas", "v6e")] for n in ("pack of 37", "T8192 H32"))
    x = tp.SHAPES["pack of 37"]
    states = x.sequences * x.HV * x.K * x.K * 4 if what == "gradient" else 0
    small = 2**20  # offsets, tables
    assert pack["temp_hbm_bytes"] <= dense["temp_hbm_bytes"] + states + small


def compile_again(folder: Path, *options: str) -> None:
    """In a process of its own, without this folder's flags, and compare with what is committed."""
    out = folder / "programs.json"
    command = [sys.executable, "-m", "kdacore_pallas.tpu_programs", "--out", str(out), *options]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    found, committed = json.loads(out.read_text()), by_program(COMMITTED)
    assert found["rows"]
    for program, row in by_program(found).items():
        check_limits(program, row)
        if found["versions"] == COMMITTED["versions"]:
            want = committed[program]
            assert row.get("refused") == want.get("refused"), program
            for name in ("code_bytes", "temp_hbm_bytes", "argument_bytes"):
                assert row.get(name) == pytest.approx(want.get(name), rel=0.02), (program, name)


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; to get it: pip install '.[pallas-tpu]'",
)


@needs_compiler
def test_what_the_compiler_says_today(tmp_path: Path) -> None:
    compile_again(tmp_path, "--cheap")


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("generation", compiler.TOPOLOGIES)
def test_what_the_compiler_says_of_all_programs(generation: str, tmp_path: Path) -> None:
    compile_again(tmp_path, "--only", f"{generation} ")
