"""What a long run will write is tried before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdacore.cli import main as cli
from kdacore.testing import fuzz

RUNS = {
    "bench results": (cli.main, ["bench", "quick", "--json"]),
    "bench picture": (cli.main, ["bench", "quick", "--plot"]),
    "tune data": (cli.main, ["tune", "--out"]),
    "tune measurements": (cli.main, ["tune", "--json"]),
    "fuzz record": (fuzz.main, ["--backend", "reference", "--json"]),
}


@pytest.mark.parametrize("place", ["", "file/record.json"])
@pytest.mark.parametrize("name", RUNS)
def test_a_file_that_cannot_be_written_is_a_usage_error(
    name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, words = RUNS[name]
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        main([*words, str(tmp_path / place)])
    assert end.value.code == 2
    assert f"argument {words[-1]}: " in (said := capsys.readouterr().err) and str(tmp_path) in said


def test_what_is_there_stays_until_there_is_something_new(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("old")
    with pytest.raises(SystemExit):
        fuzz.main(["--backend", "reference", "--json", str(path), "--count", "0"])
    assert path.read_text() == "old"
    with pytest.raises(SystemExit):
        fuzz.main(["--backend", "reference", "--json", str(tmp_path / "other.json"), "--count", "0"])
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]
