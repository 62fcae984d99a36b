from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdacore.cli import main as cli


@pytest.mark.exhaustive
def test_the_preset_times_four_contenders(tmp_path: Path) -> None:
    path = tmp_path / "xla.json"
    assert cli.main(["bench", "xla", "--tiny", "--samples", "3", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    contenders = ["reference, NumPy", "xla forward", "xla forward in jit", "xla grad in jit"]
    assert [row["contender"] for row in found["rows"]] == contenders
    assert all(row["status"] == "ok" for row in found["rows"])
    assert all(row["peak_bytes"] for row in found["rows"][2:])
    names = [figure["name"] for figure in found["figures"]]
    assert names[-1] == "memory of grad at twice the length"
