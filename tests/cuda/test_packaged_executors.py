"""The packaged executors: from the committed sources, found for this machine, rebuilt to the same bytes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shutil
from pathlib import Path

import pytest

from kdacore_cuda.build import compile_executors, packaged_executors
from kdacore_cuda.build.packaged_executors import FOLDER, MACHINES, executors_in, find_executor, source_hash

pytestmark = pytest.mark.quick


def test_every_machine_has_one_of_the_present_sources() -> None:
    rows = executors_in().rows()
    assert rows.keys() == MACHINES.keys()
    for row in rows.values():
        content = (FOLDER / row["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row["sha256"]
        assert row["source"] == source_hash()
    assert {path.name for path in FOLDER.iterdir()} == {row["file"] for row in rows.values()} | {
        "manifest.json"
    }


def compiler_version() -> str:
    try:
        return importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@pytest.mark.exhaustive
@pytest.mark.skipif(
    compiler_version() not in {row["ziglang"] for row in executors_in().rows().values()},
    reason="needs the version of ziglang that the packaged executors were compiled by",
)
def test_a_rebuild_gives_the_same_bytes(tmp_path: Path) -> None:
    rows = compile_executors.build_all(tmp_path)
    for machine, row in executors_in().rows().items():
        assert (tmp_path / rows[machine]["file"]).read_bytes() == (FOLDER / row["file"]).read_bytes()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "executors"))


def test_damaged_ones_are_not_loaded(copied: Path) -> None:
    found = find_executor(copied)
    assert isinstance(found, Path)
    found.write_bytes(found.read_bytes()[:-1] + b"?")
    assert "is damaged" in str(find_executor(copied))
    found.unlink()
    assert "cannot be read" in str(find_executor(copied))
    (copied / "manifest.json").write_text("{")
    assert "none is packaged" in str(find_executor(copied))
    (copied / "manifest.json").write_text(json.dumps({"executors": {platform.machine(): 5}}))
    assert "none is packaged" in str(find_executor(copied))


@pytest.mark.parametrize("change", ["a file changed", "a file more", "a file gone"])
def test_those_of_other_sources_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    sources = Path(shutil.copytree(packaged_executors.SOURCES, tmp_path / "sources"))
    monkeypatch.setattr(packaged_executors, "SOURCES", sources)
    (sources / "executor.c~").write_text("what an editor leaves")
    assert isinstance(find_executor(), Path)
    header = sources / "executor.h"
    if change == "a file changed":
        header.write_text(header.read_text() + "\n")
    elif change == "a file more":
        (sources / "more.c").write_text("int x;")
    else:
        header.unlink()
    assert find_executor() == "the packaged one was compiled from other sources"


def test_other_machines_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in str(find_executor())
