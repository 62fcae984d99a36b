"""The package's table of recorded times: what the committed records give, and what ``explain`` says of it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from kdacore.cli import main as cli
from kdacore.dispatch import cost_tables

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import recorded_costs as maker  # noqa: E402

pytestmark = pytest.mark.usefixtures("every_backend")


def test_the_packaged_table_is_what_the_committed_records_give() -> None:
    assert maker.TABLE.read_text(encoding="utf-8") == cost_tables.dump(maker.table()), (
        "run: python -m benchmarks.recorded_costs"
    )


def test_calls_of_the_same_sizes_are_averaged() -> None:
    """32 sequences of 32 value heads, and 128 of 8."""
    rows = json.loads((maker.RESULTS / "h200" / "fused-decode.json").read_text())["rows"]
    seconds = [r["seconds"] for r in rows if r["contender"] == "fused" and r["case"] in ("gdn-h16", "gdn-h2")]
    (columns,) = [
        columns
        for (_, group), variants in maker.table().times.items()
        if group.op == "fused_decode_gated_delta_rule"
        for columns in variants.values()
    ]
    assert len(seconds) == 2 and seconds[0] != seconds[1]
    assert columns[1024] == ((1.0, pytest.approx(sum(seconds) / 2, rel=1e-3)),)


def test_two_records_of_one_variant_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maker, "SOURCES", {**maker.SOURCES, "cpu/../h200/xla.json": maker.xla})
    with pytest.raises(ValueError, match=r"xla\.json and benchmarks/results/h200/xla\.json both have"):
        maker.table()


@pytest.mark.parametrize(
    ("record", "case", "words"),
    [
        (
            "h200-decode",
            "decode B8 H32",
            [
                "fused_recurrent_kda",
                "--state-indices",
                "8",
                "--inplace-state",
                "--shape",
                "8,1,32,32,128,128",
            ],
        ),
        ("h200-gdn", "B4 T2048 H16 HV32", ["chunk_gated_delta_rule", "--shape", "4,2048,16,32,128,128"]),
    ],
)
def test_records_count_before_what_tune_measured_earlier(
    record: str, case: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads((maker.RESULTS / "h200" / f"{record}.json").read_text())["rows"]
    found = [r["seconds"] for r in rows if (r["case"], r["contender"]) == (case, "kdacore cuda")]
    seconds = float(f"{sum(found) / len(found):.{maker.DIGITS}g}")
    assert cli.main(["explain", *words, "--arch", "sm_90", "--use-gate-in-kernel"]) == 0
    said = capsys.readouterr().out
    assert f"-> cuda: supported, {1e3 * seconds:.3g} ms\n" in said and f"results/h200/{record}.json" in said


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(maker, "TABLE", tmp_path / "recorded" / "table.json")
    monkeypatch.setattr(maker, "ROOT", tmp_path)
    for words, status in (([], 0), (["--check"], 0)):
        monkeypatch.setattr(sys, "argv", ["recorded_costs", *words])
        assert maker.main() == status
    assert capsys.readouterr().out.splitlines()[-1] == "recorded/table.json: is what the records give"
    (tmp_path / "recorded" / "table.json").write_text("{}")
    assert maker.main() == 1
    folder = tmp_path / "h200"
    shutil.copytree(maker.RESULTS / "h200", folder)
    (folder / "xla.json").write_text("{")
    whole = maker.table
    monkeypatch.setattr(maker, "table", lambda: whole(tmp_path))
    assert maker.main() == 1


def timed(record: str, case: str, contender: str) -> str:
    """Milliseconds of a committed record, as explain writes them."""
    rows = json.loads((maker.RESULTS / "h200" / f"{record}.json").read_text(encoding="utf-8"))["rows"]
    (seconds,) = [r["seconds"] for r in rows if (r["case"], r["contender"]) == (case, contender)]
    return f"{1e3 * seconds:.3g} ms measured"


def fused_decode_time(case: str) -> str:
    return timed("fused-decode", case, "fused")


def trained(record: str, case: str) -> str:
    return timed(record, case, "kdacore cuda")


EXPLAINED = [
    (
        "fused_decode_kda --shape 32,1,32,32,128,128",
        fused_decode_time("kda-b32"),
        "measured (NVIDIA H200; benchmarks/results/h200/fused-decode.json)",
    ),
    (
        "fused_decode_kda",
        "[0-9.]+ ms interpolated",
        "interpolated (NVIDIA H200; benchmarks/results/h200/fused-decode.json)",
    ),
    (
        "fused_decode_gated_delta_rule --shape 1,1,16,32,128,128",
        fused_decode_time("gdn-b1"),
        "measured (NVIDIA H200; benchmarks/results/h200/fused-decode.json)",
    ),
    (
        "chunk_kda --kind jax --shape 1,8192,64,64,128,128",
        "0.447 ms measured",
        "measured (NVIDIA H200; benchmarks/results/h200/jax-calls.json)",
    ),
    (
        "chunk_kda --kind jax --shape 1,8192,64,64,128,128 --backend xla",
        "5.09 ms measured",
        "measured (NVIDIA H200; benchmarks/results/h200/xla.json)",
    ),
    (
        "chunk_kda --shape 1,8192,64,64,128,128 --requires-grad --safe-gate",
        trained("h200-training", "B1 T8192 H64"),
        "measured (NVIDIA H200; shipped, dispatch/profiles/sm_90.json, and "
        "benchmarks/results/h200/h200-training.json)",
    ),
    (
        "chunk_gated_delta_rule --shape 1,8192,16,32,128,128 --requires-grad",
        trained("h200-gdn-training", "B1 T8192 H16 HV32"),
        "measured (NVIDIA H200; benchmarks/results/h200/h200-gdn-training.json)",
    ),
    (
        "chunk_kda --shape 1,8192,64,64,128,128 --requires-grad",
        "2.26 ms measured",
        "measured (NVIDIA H200; benchmarks/results/h200/h200-training.json)",
    ),
    (
        "chunk_kda --shape 1,8192,64,64,128,128",
        "0.414 ms measured",
        "measured (NVIDIA H200; shipped, dispatch/profiles/sm_90.json, and "
        "benchmarks/results/h200/h200-forward.json)",
    ),
    ("kda_gate", "no time measured", ""),
    ("commit_records", "no time measured", ""),
    ("fused_decode_kda --dtype float32", "no time measured", ""),
]


@pytest.mark.parametrize(("words", "time", "source"), EXPLAINED, ids=[words for words, *_ in EXPLAINED])
def test_explain_says_what_an_h200_took(
    words: str, time: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *words.split(), "--arch", "H200", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    lines = said["text"].splitlines()
    install = lines.pop() if lines[-1].startswith("to get it: ") else ""
    last = lines[-1]
    extra = {"cuda": "cuda", "xla": "jax", "triton": "triton"}[said["backend"]]
    assert re.fullmatch(rf"on sm_90( with kdacore\[{extra}\])?: {said['backend']}.*, {time}", last)
    assert not install or install.startswith(f"to get it: pip install '.[{extra}]'")
    (chosen,) = [c for c in said["candidates"] if c["backend"] == said["backend"]]
    assert chosen["cost_source"] == source
