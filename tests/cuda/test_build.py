"""Kernels compile without a GPU, hold what they should, and are cached and packaged safely."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disassembly import disassemble

from kdacore import config
from kdacore.errors import BackendBuildError
from kdacore_cuda import build, prebuilt, variants
from kdacore_cuda.build import Built, KernelSource
from kdacore_cuda.cache import DiskCache
from kdacore_cuda.prefill_kernels import prefill_kernel

KERNELS = {
    "safe": prefill_kernel(128, 2, True, False),
    "free": prefill_kernel(128, 2, False, False),
    "few heads": prefill_kernel(128, 3, True, False),
    "head dim 64": prefill_kernel(64, 1, True, False),
    "decode": variants.decode_kernel(128, False, False, variants.DECODE_ONE),
    "decode V first": variants.decode_kernel(128, True, False, variants.DECODE_ONE),
    "decode head gate": variants.decode_kernel(128, True, False, variants.DECODE_HEAD),
}


@pytest.fixture(scope="module")
def built() -> dict[str, Built]:
    return {name: build.compile_kernel(kernel, "sm_90a") for name, kernel in KERNELS.items()}


@pytest.mark.parametrize("name", KERNELS)
def test_warpgroup_products_overlap(built: dict[str, Built], name: str) -> None:
    """The compiler says when it makes each product wait for the one before, or ignores the trade of registers."""
    assert "serialized" not in built[name].log
    assert "setmaxnreg ignored" not in built[name].log


@pytest.mark.parametrize("name", KERNELS)
def test_entry_is_present(built: dict[str, Built], name: str) -> None:
    assert KERNELS[name].entry.encode() + b"\0" in built[name].cubin


@pytest.mark.parametrize(
    ("name", "instruction"),
    [("safe", "HGMMA"), ("few heads", "HGMMA"), ("head dim 64", "HGMMA"), ("free", "HGMMA")],
)
def test_matrix_instructions(built: dict[str, Built], tmp_path: Path, name: str, instruction: str) -> None:
    path = tmp_path / "kernel.cubin"
    path.write_bytes(built[name].cubin)
    text = disassemble(path)
    assert instruction in text
    loop = text[text.index(instruction) : text.rindex(instruction)]
    assert "MEMBAR.ALL.GPU" not in loop  # a cluster-scope release inside the chain costs more than the chain


@pytest.mark.parametrize("arch", ["sm_80", "sm_100f", "sm_120"])
def test_other_architectures(arch: str) -> None:
    assert build.compile_kernel(prefill_kernel(128, 1, True, False, arch), arch).cubin
    assert build.compile_kernel(variants.decode_kernel(64, True, True, variants.DECODE_ANY), arch).cubin


def test_clusters_compile_for_sm100() -> None:
    assert build.compile_kernel(prefill_kernel(64, 2, True, True, "sm_100f"), "sm_100f").cubin


def test_error_carries_the_log() -> None:
    broken = 'extern "C" __global__ void f() { this_is_not_declared(); }'
    with pytest.raises(BackendBuildError, match="this_is_not_declared") as caught:
        build.compile_text(broken, "broken", ("-arch=sm_90a",), {})
    assert caught.value.what.startswith("broken")


def test_an_empty_log_writes_to_nobody_s_memory() -> None:
    """Python has one object for each byte, which the bindings would write into: b" " was zero in the whole process."""
    done = build.compile_text("__global__ void f() {}", "f", ("--gpu-architecture=sm_80",), {})
    assert not done.log
    assert [bytes([n])[0] for n in range(256)] == list(range(256))


def test_virtual_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="sm_"):
        build.options(KERNELS["decode"], "compute_90")


def test_key_depends_on_everything() -> None:
    kernel = KERNELS["decode"]
    other = dataclasses.replace(kernel, defines=(*kernel.defines, ("EXTRA", 1)))
    keys = {
        build.source_key(kernel, "sm_90a"),
        build.source_key(kernel, "sm_100f"),
        build.source_key(other, "sm_90a"),
    }
    assert len(keys) == 3


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


def test_load_or_compile_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelSource(
        "common/recurrent/recurrent.cu", "recurrent", (*KERNELS["decode"].defines, ("UNPACKAGED", 1))
    )
    disk = DiskCache(tmp_path / "cuda")
    first = build.load_or_compile(kernel, "sm_90a", disk)

    def refuse(*args: object) -> Built:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(build, "compile_kernel", refuse)
    assert build.load_or_compile(kernel, "sm_90a", disk) == first


def test_packaged_cubins_match_their_sources() -> None:
    """Run `kdacore build` when this fails: a source changed after the cubins were built."""
    rows = json.loads((prebuilt.FOLDER / prebuilt.MANIFEST).read_text())["cubins"]
    expected = {
        f"{k.name}.{arch}": (k, arch)
        for arch in prebuilt.PACKAGED_ARCHS
        for k in variants.packaged_kernels(arch)
    }
    assert rows.keys() == expected.keys()
    for kernel, arch in expected.values():
        assert prebuilt.find_packaged(kernel, arch, build.source_key(kernel, arch)) is not None, kernel.name


def damage_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """What writes a manifest's only row anew."""

    def damage(cubin: Path) -> None:
        path = cubin.parent / prebuilt.MANIFEST
        document = json.loads(path.read_text())
        (row,) = document["cubins"].values()
        change(row)
        path.write_text(json.dumps(document))

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "changed cubin": lambda cubin: cubin.write_bytes(b"damaged"),
    "torn cubin": lambda cubin: cubin.write_bytes(cubin.read_bytes()[:-1]),
    "no cubin": Path.unlink,
    "a folder for a cubin": lambda cubin: (cubin.unlink(), cubin.mkdir()),
    "no manifest": lambda cubin: (cubin.parent / prebuilt.MANIFEST).unlink(),
    "torn manifest": lambda cubin: (cubin.parent / prebuilt.MANIFEST).write_text('{"cubins": {'),
    "manifest that is no text": lambda cubin: (cubin.parent / prebuilt.MANIFEST).write_bytes(b"\xff\xfe\x00"),
    "manifest without cubins": lambda cubin: (cubin.parent / prebuilt.MANIFEST).write_text("{}"),
    "manifest that is a list": lambda cubin: (cubin.parent / prebuilt.MANIFEST).write_text("[]"),
    "row that is a word": lambda cubin: (cubin.parent / prebuilt.MANIFEST).write_text(
        '{"cubins": {"x": "y"}}'
    ),
    "no file": damage_manifest(lambda row: row.pop("file")),
    "no source": damage_manifest(lambda row: row.pop("source")),
    "no digest": damage_manifest(lambda row: row.pop("sha256")),
    "a number for a file": damage_manifest(lambda row: row.update(file=3)),
}


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> KernelSource:
    """The only kernel there is to package; compiling is quick."""
    kernel = KERNELS["decode"]
    monkeypatch.setattr(variants, "packaged_kernels", lambda arch: [kernel])
    log = "16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nUsed 40 registers"
    monkeypatch.setattr(
        prebuilt, "compile_kernel", lambda kernel, arch: Built(f"{kernel.name} {arch}".encode(), log)
    )
    return kernel


@pytest.mark.parametrize("damage", DAMAGE)
def test_changed_source_or_damaged_file_is_not_used(
    tmp_path: Path, one_kernel: KernelSource, damage: str
) -> None:
    (path,) = prebuilt.build_all(["sm_90a"], tmp_path)
    key = build.source_key(one_kernel, "sm_90a")
    assert prebuilt.find_packaged(one_kernel, "sm_90a", key, tmp_path) == path.read_bytes()
    assert prebuilt.find_packaged(one_kernel, "sm_90a", "another key", tmp_path) is None
    DAMAGE[damage](path)
    prebuilt._rows.cache_clear()  # as a process that starts now
    assert prebuilt.find_packaged(one_kernel, "sm_90a", key, tmp_path) is None


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "a folder for a cubin"])
def test_a_damaged_folder_is_built_anew(tmp_path: Path, one_kernel: KernelSource, damage: str) -> None:
    (path,) = prebuilt.build_all(["sm_90a"], tmp_path)
    DAMAGE[damage](path)
    assert prebuilt.build_all(["sm_90a"], tmp_path) == [path]
    key = build.source_key(one_kernel, "sm_90a")
    assert prebuilt.find_packaged(one_kernel, "sm_90a", key, tmp_path) == path.read_bytes()


def test_one_architecture_is_built_beside_the_others(
    tmp_path: Path, one_kernel: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper, blackwell = prebuilt.build_all(["sm_90a", "sm_100f"], tmp_path)
    before = {path: path.read_bytes() for path in (hopper, blackwell)}
    gone = [tmp_path / f"gone.{arch}.cubin" for arch in ("sm_90a", "sm_100f")]
    for path in gone:
        path.write_bytes(b"of a kernel that is no more")
    assert prebuilt.build_all(["sm_90a"], tmp_path) == [hopper]
    assert {path: path.read_bytes() for path in before} == before
    assert [path.exists() for path in gone] == [False, True]
    for arch in ("sm_90a", "sm_100f"):
        key = build.source_key(one_kernel, arch)
        assert prebuilt.find_packaged(one_kernel, arch, key, tmp_path) is not None
    monkeypatch.setattr(variants, "packaged_kernels", lambda arch: [KERNELS["decode V first"]])
    (other,) = prebuilt.build_all(["sm_100f"], tmp_path)
    assert {path.name for path in tmp_path.glob("*.cubin")} == {hopper.name, other.name}
    assert len(json.loads((tmp_path / prebuilt.MANIFEST).read_text())["cubins"]) == 2


def test_the_manifest_says_what_the_compiler_said(tmp_path: Path, one_kernel: KernelSource) -> None:
    prebuilt.build_all(["sm_90a"], tmp_path)
    (row,) = json.loads((tmp_path / prebuilt.MANIFEST).read_text())["cubins"].values()
    assert (row["registers"], row["stack"], row["spills"]) == (40, 16, 8)


@pytest.mark.parametrize("arch", ["bogus", "", "sm_", "compute_90", "sm_90z", "sm_999", "sm_75"])
def test_architectures_that_cannot_be_built(arch: str) -> None:
    assert build.arch_problem(arch)


@pytest.mark.parametrize("arch", [*prebuilt.PACKAGED_ARCHS, "sm_80", "sm_86", "sm_120"])
def test_architectures_that_can_be_built(arch: str) -> None:
    assert build.arch_problem(arch) is None


def test_every_lane_may_arrive_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """For racecheck; such a kernel has a key of its own."""
    kernel = KERNELS["safe"]
    plain = build.source_key(kernel, "sm_90a")
    monkeypatch.setattr(config, "_config", config.parse({build.EVERY_LANE: "1"}))
    assert "-DEVERY_LANE=1" in build.options(kernel, "sm_90a")
    assert build.source_key(kernel, "sm_90a") != plain
