"""The disk cache of compiled kernels: damaged, foreign and unusable folders are misses."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from kdacore import config
from kdacore_cuda.build import cubin_lookup, disk_cache
from kdacore_cuda.build.compiler import CompiledKernel
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel

KERNEL = recurrent_kernel(128, False, "float32", RecurrentMode.ONE_TOKEN).source


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache is."""
    elsewhere = dataclasses.replace(config.get(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "get", lambda: elsewhere)
    return tmp_path / "cache" / "cuda"


def test_cache_round_trip_and_damage(folder: Path) -> None:
    assert disk_cache.get("k") is None
    disk_cache.put("k", b"cubin")
    assert disk_cache.get("k") == b"cubin"
    path = folder / "k.bin"
    path.write_bytes(path.read_bytes()[:-1])
    assert disk_cache.get("k") is None
    path.write_bytes(b"")
    assert disk_cache.get("k") is None


def check_refused(folder: Path) -> None:
    assert disk_cache.get("k") is None
    disk_cache.put("other", b"cubin")
    assert [path.name for path in folder.iterdir()] == ["k.bin"]


def test_cache_of_another_owner_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.put("k", b"cubin")
    if os.geteuid() == 0:  # what is root's is anybody's
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    check_refused(folder)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_cache_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    disk_cache.put("k", b"cubin")
    folder.chmod(mode)
    check_refused(folder)


def test_unusable_cache_folder_is_a_miss(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("")
    disk_cache.put("k", b"cubin")
    assert disk_cache.get("k") is None


def test_a_full_disk_stores_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    disk_cache.put("k", b"cubin")
    assert not [*folder.iterdir()]


def test_load_or_compile_uses_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelSource("common/recurrent/recurrent.cu", "recurrent", (*KERNEL.defines, ("UNPACKAGED", 1)))
    first = cubin_lookup.load_or_compile(kernel, "sm_90a")

    def refuse(*args: object) -> CompiledKernel:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(cubin_lookup, "compile_kernel", refuse)
    cubin_lookup.load_or_compile.cache_clear()  # as a process that starts now
    assert cubin_lookup.load_or_compile(kernel, "sm_90a") == first
