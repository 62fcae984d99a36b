"""The packaged XLA handlers: from the committed source, found for this machine, rebuilt to the same bytes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shutil
from pathlib import Path

import pytest

from kdacore.errors import PerformanceWarning
from kdacore_cuda.build import compile_handlers as handler_build
from kdacore_cuda.build import packaged_handlers
from kdacore_cuda.build.packaged_executors import FOLDER, MACHINES, find_executor, read_manifest, source_hash
from kdacore_cuda.jax import python_handler as ffi_callback
from kdacore_cuda.jax import xla_handler
from kdacore_cuda.runtime import driver

pytestmark = pytest.mark.quick


def test_every_machine_has_one_of_the_present_source() -> None:
    rows = read_manifest()
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


@pytest.mark.skipif(
    compiler_version() not in {row["ziglang"] for row in read_manifest().values()},
    reason="needs the version of ziglang that the packaged handlers were compiled by",
)
def test_a_rebuild_gives_the_same_bytes(tmp_path: Path) -> None:
    rows = handler_build.build_all(tmp_path)
    for machine, row in read_manifest().items():
        assert (tmp_path / rows[machine]["file"]).read_bytes() == (FOLDER / row["file"]).read_bytes()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "handlers"))


def test_damaged_and_stale_ones_are_not_loaded(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_executor(copied)
    assert isinstance(found, Path)
    found.write_bytes(found.read_bytes()[:-1] + b"?")
    assert "is damaged" in str(find_executor(copied))
    found.unlink()
    assert "cannot be read" in str(find_executor(copied))
    (copied / "manifest.json").write_text("{")
    assert "none is packaged" in str(find_executor(copied))
    (copied / "manifest.json").write_text(json.dumps({"handlers": {platform.machine(): 5}}))
    assert "none is packaged" in str(find_executor(copied))
    changed = tmp_path / "other.c"
    changed.write_text("int x;")
    monkeypatch.setattr(packaged_handlers, "SOURCE", changed)
    assert find_executor() == "the packaged one was compiled from another source"


def test_other_machines_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in str(find_executor())


def test_the_handler_in_python_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    made = object()
    monkeypatch.setattr(packaged_handlers, "find_executor", lambda: "none for this test")
    monkeypatch.setattr(driver, "driver", lambda: None)
    monkeypatch.setattr(ffi_callback, "make_handler", lambda driver: made)
    with pytest.warns(PerformanceWarning, match="none for this test"):
        assert xla_handler.load() is made


def test_a_driver_that_lacks_a_function_is_said(tmp_path: Path) -> None:
    found = find_executor()
    assert isinstance(found, Path)
    assert "cannot open" in str(xla_handler.load_native(found, str(tmp_path / "libcuda.so.1")))
    assert "has no cuCtxGetCurrent" in str(xla_handler.load_native(found, "libm.so.6"))
