"""Every example of docs/guide/command-line.md runs, and every command stands in it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kdacore.bench.cases import PRESETS, SPECIAL
from kdacore.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "guide" / "command-line.md").read_text()
EXAMPLES = re.findall(r"^\$ kdacore (.+)$", TEXT, re.MULTILINE)


@pytest.mark.usefixtures("every_backend", "requests_built_once")
@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(shlex.split(example)) == 0
    assert capsys.readouterr().out


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 9


def test_every_command_and_preset_is_described() -> None:
    for command in cli.COMMANDS:
        assert re.search(rf"^## {command}: ", TEXT, re.MULTILINE), command
    for preset in (*SPECIAL, *PRESETS):
        assert f"`{preset}`" in TEXT, preset
