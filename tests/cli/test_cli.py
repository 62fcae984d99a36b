"""The command itself: version, help, bad usage, and what each exit status means."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kdacore
from kdacore import config
from kdacore.cli import main as cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"kdacore {kdacore.__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"\n    {command} " in out


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    assert done.value.code == 0
    assert f"usage: kdacore {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["nonsense"], ["doctor", "--nonsense"], ["explain"], ["explain", "no_op"]]
)
def test_bad_usage_is_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(words)
    assert done.value.code == 2


def test_python_m_kdacore() -> None:
    done = subprocess.run([sys.executable, "-m", "kdacore", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kdacore {kdacore.__version__}\n")


def test_help_imports_no_framework() -> None:
    code = (
        "import sys\nfrom kdacore.cli import main as cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'jax', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_closed_pipe_is_not_a_traceback() -> None:
    command = f"{sys.executable} -m kdacore explain chunk_kda --kind numpy --device cpu | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    """As of a daemon. What has another stream still goes there."""
    command = f"{sys.executable} -m kdacore plugins {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("reference" in done.stdout) == (closed == "2>&-")


def test_a_bad_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KDACORE_VALIDATE", "maybe")
    monkeypatch.setattr(config, "_config", None)
    assert cli.main(["plugins"]) == 2
    assert "KDACORE_VALIDATE='maybe'; wanted 'shapes' or 'values'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["docter"], "doctor"),
        (["version"], "--version"),
        (["explain", "chunk_kad"], "chunk_kda"),
        (["explain", "chunk_kda", "--shpae", "1"], "--shape"),
        (["explain", "chunk_kda", "--lowerbound=-5"], "--lower-bound"),
        (["bench", "quikc"], "quick"),
        (["bench", "--backend", "refrence"], "reference"),
        (["tune", "configs", "--op", "chunk_kad"], "chunk_kda"),
        (["explain", "chunk"], "chunk_kda"),
        (["explain", "commit"], "commit_records"),
        (["explain", "chunk_kda", "--dtpye", "x"], "--dtype"),
        (["explain", "chunk_kda", "--kind", "tork"], "torch"),
        (["explain", "chunk_kda", "--arch", "gh2000"], "GH200"),
    ],
)
def test_misspelt_words_name_the_nearest(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(words)
    except SystemExit as leaving:
        status = int(str(leaving.code))
    assert status == 2
    assert capsys.readouterr().err.rstrip().endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize(
    "words",
    [
        ["explain"],
        ["explain", "decode"],
        ["explain", "nonsense"],
        ["explain", "chunk_kda", "--nonsense"],
        ["explain", "chunk_kda", "--shape", "1"],
        ["explain", "chunk_kda", "--kind", "tensor"],
        ["doctor", "--op", "nonsense"],
        ["bench", "quick", "--nonsense", "1"],
        ["nonsense"],
        [],
    ],
)
def test_usage_errors_are_short(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Where to find the switches, and what is wrong, which comes last."""
    with pytest.raises(SystemExit):
        cli.main(words)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 6 and max(map(len, lines)) <= 100
    chosen = " ".join(["kdacore", *words[:1]]) if words and words[0] in cli.COMMANDS else "kdacore"
    assert lines[0].startswith(f"usage: {chosen} ") and f"{chosen} --help" in lines[0]
    assert lines[1].startswith(f"{chosen}: error: ")


def test_part_of_the_names_of_several_ops_lists_these(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "decode"])
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("no op 'decode'; there are fused_decode_kda, fused_decode_gated_delta_rule")
