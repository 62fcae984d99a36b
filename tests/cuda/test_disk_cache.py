"""The disk cache of compiled kernels: damaged, foreign and unusable folders are misses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kdacore_cuda.build import cubin_lookup
from kdacore_cuda.build.compiler import CompiledKernel
from kdacore_cuda.build.disk_cache import DiskCache
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel

KERNEL = recurrent_kernel(128, False, False, RecurrentMode.ONE_TOKEN).source


def test_cache_round_trip_and_damage(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cuda")
    assert cache.get("k") is None
    assert cache.put("k", b"cubin")
    assert cache.get("k") == b"cubin"
    path = tmp_path / "cuda" / "k.bin"
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.get("k") is None
    path.write_bytes(b"")
    assert cache.get("k") is None


def test_cache_of_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path / "cuda")
    assert cache.put("k", b"cubin")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache.get("k") is None
    assert not cache.put("other", b"cubin")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_cache_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    cache = DiskCache(tmp_path / "cuda")
    assert cache.put("k", b"cubin")
    (tmp_path / "cuda").chmod(mode)
    assert cache.get("k") is None
    assert not cache.put("other", b"cubin")


def test_unusable_cache_folder_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cuda")
    assert cache.get("k") is None
    assert not cache.put("k", b"cubin")


def test_a_full_disk_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = DiskCache(tmp_path / "cuda")
    monkeypatch.setattr(os, "replace", full)
    assert not cache.put("k", b"cubin")
    assert not [*(tmp_path / "cuda").iterdir()]


def test_load_or_compile_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelSource("common/recurrent/recurrent.cu", "recurrent", (*KERNEL.defines, ("UNPACKAGED", 1)))
    disk = DiskCache(tmp_path / "cuda")
    monkeypatch.setattr(cubin_lookup, "DiskCache", lambda: disk)
    first = cubin_lookup.load_or_compile(kernel, "sm_90a")

    def refuse(*args: object) -> CompiledKernel:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(cubin_lookup, "compile_kernel", refuse)
    cubin_lookup.load_or_compile.cache_clear()  # as a process that starts now
    assert cubin_lookup.load_or_compile(kernel, "sm_90a") == first
