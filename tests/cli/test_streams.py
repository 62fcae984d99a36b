"""Readers that leave and disks that are full: the exit status of a command is its own, in every subcommand."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kdacore import config, files, streams
from kdacore.cli import main as cli
from kdacore.testing import fuzz

WORDS = {
    "help": ["--help"],
    "help of one": ["explain", "--help"],
    "version": ["--version"],
    "usage": ["plugins", "--nonsense"],
    "plugins": ["plugins"],
    "explain": ["explain", "chunk_kda", "--kind", "numpy"],
    "explain as JSON": ["explain", "chunk_kda", "--kind", "numpy", "--json"],
    "no backend": ["explain", "chunk_kda", "--dtype", "float16", "--backend", "reference", "--kind", "numpy"],
    "demo": ["demo", "--limit", "200", "--backend", "reference"],
    "bench": ["bench", "--list"],
    "tune": ["tune", "--list"],
    "doctor": ["doctor", "--no-selfcheck"],
    "doctor as JSON": ["doctor", "--no-selfcheck", "--json"],
    "verify": ["verify", "nonsense"],
}
CASES = [(name, buffered) for name in WORDS for buffered in ((True,) if "doctor" in name else (True, False))]


@contextlib.contextmanager
def output(broken: str, buffered: bool) -> Iterator[None]:
    """Standard output into a pipe that nobody reads, or into a full disk."""
    if broken == "pipe":
        reads, handle = os.pipe()
        os.close(reads)
    else:
        handle = os.open("/dev/full", os.O_WRONLY)
    before = sys.stdout
    with io.TextIOWrapper(os.fdopen(handle, "wb"), write_through=not buffered) as stream:
        sys.stdout = stream
        try:
            yield
            stream.flush()  # as the interpreter does at its end
        finally:
            sys.stdout = before


def status_of(words: list[str]) -> Any:
    try:
        return cli.main(words)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(("name", "buffered"), CASES)
def test_a_reader_that_left_changes_no_status(
    name: str, buffered: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    want = status_of(WORDS[name])
    capsys.readouterr()
    with output("pipe", buffered):
        assert status_of(WORDS[name]) == want
    assert "Traceback" not in (said := capsys.readouterr().err) and "Broken pipe" not in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
@pytest.mark.parametrize(("name", "buffered"), [c for c in CASES if c[0] not in ("usage", "verify")])
def test_a_full_disk_is_one_line_and_status_1(
    name: str, buffered: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with output("disk", buffered):
        assert status_of(WORDS[name]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kdacore")]
    assert len(lines) == 1 and "No space left on device" in lines[0]


@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["explain", "chunk_kda", "--kind", "numpy"]])
def test_a_process_whose_reader_left(words: list[str]) -> None:
    command = f"{sys.executable} -m kdacore {' '.join(words)} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_streams_are_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="mine"), streams.for_readers():
        print("said")
        raise ValueError("mine")
    assert (sys.stdout, sys.stderr) == before and capsys.readouterr().out == "said\n"


# --- records ------------------------------------------------------------------------------------------------------

FUZZ = ["--backend", "reference", "--count", "1", "--seed", "3", "--json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
def test_random_calls_on_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main([*FUZZ, "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "served" in out, "what was found is said"
    assert "No space left on device: '/dev/full'" in err and "Traceback" not in err
    assert Path("/dev/full").is_char_device()


def test_random_calls_without_a_reader(tmp_path: Path) -> None:
    with output("pipe", False):
        assert fuzz.main([*FUZZ, str(tmp_path / "record.json")]) == 0
    assert (tmp_path / "record.json").stat().st_size, "the record is written all the same"


def test_a_named_file_is_replaced_whole(tmp_path: Path) -> None:
    target, link = tmp_path / "old.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    files.write_named(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o640
    fresh, usual = tmp_path / "fresh.json", tmp_path / "usual.json"
    files.write_named(fresh, "new")
    usual.touch()
    assert fresh.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("existed", [False, True])
def test_a_named_file_that_cannot_be_written_stays_as_it_was(
    existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    if existed:
        path.write_text("old")

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left on device: '.*record.json'"):
        files.write_named(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"] * existed
    assert not existed or path.read_text() == "old"


# --- places -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["subprocess", "multiprocessing", "json"])
def test_workers_import_nothing_from_the_current_folder(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("open('executed', 'w')\nraise SystemExit('executed')")
    code = """
import operator, os, sys
from kdacore.testing import processes
os.chdir(sys.argv[1])
work = processes.Work(run=os.getenv, failed=operator.not_, lost=max)
if __name__ == "__main__":
    print(list(processes.run(work, iter(["PYTHONSAFEPATH"] * 2), 2)), os.environ.get("PYTHONSAFEPATH"))
"""
    script = tmp_path / "sub" / "script.py"
    script.parent.mkdir()
    script.write_text(code)
    environment = {n: x for n, x in os.environ.items() if n != "PYTHONSAFEPATH"}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == ("[None, None] None\n", 0), done.stderr[-2000:]
    assert not (tmp_path / "executed").exists()


def test_a_cache_folder_without_a_home_or_user_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert config.parse({}).cache_dir.name == f"kdacore-{os.getuid()}"
    monkeypatch.delattr(os, "getuid")
    assert config.parse({}).cache_dir.name == "kdacore"


@pytest.mark.parametrize(
    ("kind", "device", "wanted"),
    [
        ("numpy", "cuda", "cpu, where NumPy's arrays are"),
        ("numpy", "tpu", "cpu, where NumPy's arrays are"),
        ("torch", "tpu", "torch has no tensors there"),
        ("jax", "meta", "JAX has no arrays there"),
    ],
)
def test_devices_where_a_library_has_no_arrays(
    kind: Any, device: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["explain", "chunk_kda"], ["doctor", "--no-selfcheck", "--op", "chunk_kda"]):
        assert cli.main([*command, "--kind", kind, "--device", device]) == 2
        assert f"argument 'device': got {device} with --kind {kind}; wanted" in (
            said := capsys.readouterr().err
        )
        assert wanted in said
    import kdacore

    x = kdacore.ShapeDtype((1, 8, 1, 8), kind=kind, device=device)
    with pytest.raises(kdacore.ContractError, match=f"'q': got an array of kind {kind} on {device}; wanted"):
        kdacore.explain("chunk_kda", x, x, x, x, kdacore.ShapeDtype((1, 8, 1), kind=kind, device=device))


def test_numpy_alone_means_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "chunk_kda", "--kind", "numpy", "--dtype", "float32", "--shape", "1,8,1,1,8,8"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("chunk_kda on cpu, numpy arrays")
