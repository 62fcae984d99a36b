"""``kdacore demo``: the main job on a real text, and the texts it cannot use."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from kdacore.cli import demo
from kdacore.cli import main as cli
from kdacore.hookspecs import hookimpl
from kdacore.registry import REGISTRY
from kdacore.types import Backend, Outputs


def test_the_licence(capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.perf_counter()
    assert cli.main(["demo"]) == 0
    assert time.perf_counter() - begun < 15
    out = capsys.readouterr().out
    assert str(demo.licence_file()) in out
    assert "prefill + decode equals one pass" in out
    for run in ("one pass: chunk_kda", "prefill: chunk_kda", "decode: fused_recurrent_kda"):
        line = next(line for line in out.splitlines() if run in line)
        assert line.split(run)[1].split()[0] == "reference"
    assert out.count(" ok") == 5


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes("Naïve café, größer.\n".encode() * 40)
    assert cli.main(["demo", str(text), "--tail", "7", "--limit", "300"]) == 0
    out = capsys.readouterr().out
    assert f"{text}, 960 bytes, the first 300 of them" in out
    assert "decode: fused_recurrent_kda  reference  7 " in out


def test_a_long_text_is_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "BLOCK", 128)
    monkeypatch.setattr(demo, "ORACLE_TOKENS", 200)
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 2)
    assert cli.main(["demo", str(text)]) == 0
    assert "the oracle read the first 200 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, [], "cannot read"),
        (b"", [], "holds 0 bytes: too short"),
        (b"x", [], "holds 1 bytes: too short"),
        (b"some text", ["--tail", "9"], "--tail 9: wanted 1 to 8"),
        (b"some text", ["--tail", "0"], "--tail 0: wanted 1 to 8"),
        (b"some text", ["--limit", "1"], "--limit 1: wanted at least 2"),
    ],
)
def test_texts_it_cannot_use(
    content: bytes | None, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["demo", str(path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_is_not_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_an_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--backend", "nonsense"]) == 2
    assert "'nonsense'" in capsys.readouterr().err


def test_a_wrong_backend_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that loses the state between prefill and decode: everything looks right but the answer."""
    reference = REGISTRY.get("reference").backend

    def forgets(request: object, inputs: object) -> Outputs:
        out: Outputs = reference.ops["chunk_kda"].forward(request, inputs)
        return out._replace(final_state=np.zeros_like(out.final_state))

    class Plugin:
        @hookimpl
        def kdacore_backends(self) -> list[Backend]:
            ops = {**reference.ops}
            ops["chunk_kda"] = dataclasses.replace(ops["chunk_kda"], forward=forgets)
            return [dataclasses.replace(reference, name="forgetful", ops=ops)]

    REGISTRY.register(Plugin(), "forgetful")
    text = tmp_path / "text.txt"
    text.write_bytes(b"long memory " * 20)
    assert cli.main(["demo", str(text), "--backend", "forgetful"]) == 1
    out = capsys.readouterr().out
    assert "NOT one pass" in out and "FAILED" in out


def test_every_interpreter_has_a_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a distribution left the licence out, something real is still read."""
    monkeypatch.setattr(demo.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    monkeypatch.setattr(demo.sys, "base_prefix", str(tmp_path))
    monkeypatch.delattr(demo.builtins, "license", raising=False)
    name, text = demo.read_text(None)
    assert len(text) > 1000 and Path(name).is_file()
