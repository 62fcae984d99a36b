"""Self-check records and other files of the cache folder, as a stranger, a full disk or a kill may leave them."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kdacore import config, files
from kdacore.selfcheck import records
from kdacore.testing.verify import Report

GOOD: records.Record = {"error": 0.001, "bound": 0.01, "failure": "", "misfit": ""}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "sm_90"
    folder.mkdir(mode=0o700)
    return folder / "backend-op-0.json"


def test_a_record_comes_back(path: Path) -> None:
    for record in (GOOD, {**GOOD, "error": float("inf"), "bound": 0.0, "misfit": "no o"}):
        records.write(path, record)  # type: ignore[arg-type]
        assert records.read(path) == record
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    "changed",
    [
        {"error": "0"},
        {"error": None},
        {"error": True},
        {"error": [0.0]},
        {"error": float("nan")},
        {"error": -1.0},
        {"error": 10**400},
        {"bound": float("nan")},
        {"bound": float("inf")},
        {"bound": "1"},
        {"failure": "raised"},
        {"failure": 0},
        {"failure": None},
        {"misfit": ["o"]},
        {"misfit": None},
        {"misfit": "no final_state"},
        {"more": 1},
    ],
    ids=str,
)
def test_malformed_records_are_none(path: Path, changed: dict[str, Any]) -> None:
    path.write_text(json.dumps({**GOOD, **changed}))
    path.chmod(0o600)
    assert records.read(path) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 16000,
        b'{"error": ' + b"[" * 8000 + b"]" * 8000 + b"}",
        b'{"error": ' + b"9" * 9000 + b"}",
        json.dumps(GOOD).encode() + b" " * 20000,
    ],
    ids=["empty", "null", "list", "bytes", "open", "deep", "digits", "huge"],
)
def test_what_is_no_record_is_none(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    path.chmod(0o600)
    assert records.read(path) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFO here")
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_file_is_none(path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    else:
        path.symlink_to("/dev/zero")
    assert records.read(path) is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners are POSIX's")
def test_only_ours_is_believed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write(path, GOOD)
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        assert records.read(path) is None
    path.chmod(0o600)
    for mode in (0o770, 0o777):
        path.parent.chmod(mode)
        assert records.read(path) is None
    path.parent.chmod(0o700)
    assert records.read(path) == GOOD
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
        assert records.read(path) is None
        os.chown(path, 0, -1)
        os.chown(path.parent, 4242, -1)
        assert records.read(path) is None


def test_a_folder_made_for_a_group_is_closed(tmp_path: Path) -> None:
    """Where the umask lets a group write, records would never be believed again."""
    before = os.umask(0o002)
    try:
        path = tmp_path / "open" / "record.json"
        path.parent.mkdir()
        path.parent.chmod(0o775)
        records.write(path, GOOD)
    finally:
        os.umask(before)
    assert records.read(path) == GOOD


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_nothing_and_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", _full)
    records.write(path, GOOD)
    assert not [*path.parent.iterdir()]
    with pytest.raises(OSError, match=r"backend-op-0\.json"):
        files.write_whole(path, "text")
    report = Report("b", "0", "cpu", "quick", 0, "", 0.0, "", {}, {}, 0, {}, [], {})
    with pytest.raises(OSError, match=r"backend-op-0\.json"):
        report.write(path)
    assert not [*path.parent.iterdir()]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_write_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdopen
    monkeypatch.setattr(
        os,
        "fdopen",
        lambda handle, *a, **k: (os.close(handle), real(os.open("/dev/full", os.O_WRONLY), *a, **k))[1],
    )
    with pytest.raises(OSError, match="No space left on device.*report"):
        files.write_whole(tmp_path / "report.json", "x" * 100_000)
    assert not [*tmp_path.iterdir()]


def test_an_interrupt_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        records.write(path, GOOD)
    assert not [*path.parent.iterdir()]


def test_what_a_kill_left_goes_with_the_next_record(path: Path) -> None:
    old, new = path.parent / "tmpold.tmp", path.parent / "tmpnew.tmp"
    old.write_text("")
    new.write_text("")
    long_ago = time.time() - 7200
    os.utime(old, (long_ago, long_ago))
    records.write(path, GOOD)
    assert {*path.parent.iterdir()} == {path, new}


@pytest.mark.parametrize("given", ["cache", "./cache", "../cache", " "])
def test_a_relative_xdg_folder_is_ignored(given: str) -> None:
    found = config.parse({"XDG_CACHE_HOME": given}).cache_dir
    assert found == Path.home() / ".cache" / "kdacore"
