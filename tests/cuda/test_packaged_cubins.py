"""The packaged cubins and their manifest: current, complete, and safe against damage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdacore.errors import BackendBuildError
from kdacore_cuda.architectures import PACKAGED_ARCHS
from kdacore_cuda.build import packaging as package_build
from kdacore_cuda.build.compiler import CompiledKernel
from kdacore_cuda.build.kernel_source import KernelSource, source_key
from kdacore_cuda.build.launch_sizes import read_launch_sizes
from kdacore_cuda.build.packaged_cubins import (
    CUBINS,
    FOLDER,
    cached_rows,
    cubins_in,
    find_packaged,
    row_name,
)
from kdacore_cuda.build.packaged_files import MANIFEST
from kdacore_cuda.choice import RecurrentMode
from kdacore_cuda.forms.packaged_kernels import packaged_kernels
from kdacore_cuda.forms.recurrent.kernels import recurrent_kernel

pytestmark = pytest.mark.quick

KERNEL = recurrent_kernel(128, False, "float32", RecurrentMode.ONE_TOKEN).source
CUBIN = (FOLDER / CUBINS.rows()[row_name(KERNEL, "sm_90a")]["file"]).read_bytes()
SIZES = read_launch_sizes(CUBIN, KERNEL.entry)
OTHER_KERNEL = recurrent_kernel(128, True, "float32", RecurrentMode.ONE_TOKEN).source


def test_packaged_cubins_match_their_sources() -> None:
    """Run `kdacore build` when this fails: a source changed after the cubins were built."""
    rows = CUBINS.rows()
    expected = {row_name(k, arch): (k, arch) for arch in PACKAGED_ARCHS for k in packaged_kernels(arch)}
    assert rows.keys() == expected.keys()
    for kernel, arch in expected.values():
        assert find_packaged(kernel, arch, source_key(kernel, arch)) is not None, kernel.name


def test_the_manifest_names_every_file_and_only_those() -> None:
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.name != MANIFEST}
    assert files.keys() == {row["file"] for row in CUBINS.rows().values()}
    for name, cubin in files.items():
        assert name == f"{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"
        assert CUBINS.is_name(name)


def test_paths_are_short() -> None:
    """A path of the package is at most 120 characters long in the wheel."""
    root = FOLDER.parents[1]
    assert max(len(str(path.relative_to(root))) for path in FOLDER.parent.rglob("*")) < 120


def damage_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A function that changes a manifest's only row."""

    def damage(cubin: Path) -> None:
        path = cubin.parent / MANIFEST
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
    "no manifest": lambda cubin: (cubin.parent / MANIFEST).unlink(),
    "torn manifest": lambda cubin: (cubin.parent / MANIFEST).write_text('{"cubins": {'),
    "manifest that is no text": lambda cubin: (cubin.parent / MANIFEST).write_bytes(b"\xff\xfe\x00"),
    "manifest without cubins": lambda cubin: (cubin.parent / MANIFEST).write_text("{}"),
    "manifest that is a list": lambda cubin: (cubin.parent / MANIFEST).write_text("[]"),
    "row that is a word": lambda cubin: (cubin.parent / MANIFEST).write_text('{"cubins": {"x": "y"}}'),
    "no file": damage_manifest(lambda row: row.pop("file")),
    "no source": damage_manifest(lambda row: row.pop("source")),
    "no digest": damage_manifest(lambda row: row.pop("sha256")),
    "a number for a file": damage_manifest(lambda row: row.update(file=3)),
    "a file elsewhere": damage_manifest(lambda row: row.update(file="../0123456789abcdef.cubin")),
    "a number for a digest": damage_manifest(lambda row: row.update(sha256=3)),
    "a manifest too deep to read": lambda cubin: (cubin.parent / MANIFEST).write_text("[" * 100_000),
}


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> KernelSource:
    """The only kernel to package, with a compiler that takes no time."""
    kernel = KERNEL
    monkeypatch.setattr(package_build, "packaged_kernels", lambda arch: [kernel])
    log = "16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nUsed 40 registers"
    monkeypatch.setattr(
        package_build,
        "compile_kernel",
        lambda kernel, arch: CompiledKernel(CUBIN + f"{kernel.name} {arch}".encode(), log),
    )
    return kernel


@pytest.mark.parametrize("damage", DAMAGE)
def test_changed_source_or_damaged_file_is_not_used(
    tmp_path: Path, one_kernel: KernelSource, damage: str
) -> None:
    (path,) = package_build.build_all(["sm_90a"], tmp_path)
    key = source_key(one_kernel, "sm_90a")
    assert find_packaged(one_kernel, "sm_90a", key, cubins_in(tmp_path)) == path.read_bytes()
    assert find_packaged(one_kernel, "sm_90a", "another key", cubins_in(tmp_path)) is None
    DAMAGE[damage](path)
    cached_rows.cache_clear()  # as a process that starts now
    assert find_packaged(one_kernel, "sm_90a", key, cubins_in(tmp_path)) is None


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "a folder for a cubin"])
def test_a_damaged_folder_is_built_anew(tmp_path: Path, one_kernel: KernelSource, damage: str) -> None:
    (path,) = package_build.build_all(["sm_90a"], tmp_path)
    DAMAGE[damage](path)
    assert package_build.build_all(["sm_90a"], tmp_path) == [path]
    key = source_key(one_kernel, "sm_90a")
    assert find_packaged(one_kernel, "sm_90a", key, cubins_in(tmp_path)) == path.read_bytes()


def test_one_architecture_is_built_beside_the_others(
    tmp_path: Path, one_kernel: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper, blackwell = package_build.build_all(["sm_90a", "sm_100f"], tmp_path)
    before = {path: path.read_bytes() for path in (hopper, blackwell)}
    unnamed, foreign = tmp_path / "0123456789abcdef.cubin", tmp_path / "somebody's.cubin"
    for path in (unnamed, foreign):
        path.write_bytes(b"of a kernel that the manifest does not name")
    assert package_build.build_all(["sm_90a"], tmp_path) == [hopper]
    assert {path: path.read_bytes() for path in before} == before
    assert [path.exists() for path in (unnamed, foreign)] == [False, True]
    foreign.unlink()
    for arch in ("sm_90a", "sm_100f"):
        key = source_key(one_kernel, arch)
        assert find_packaged(one_kernel, arch, key, cubins_in(tmp_path)) is not None
    monkeypatch.setattr(package_build, "packaged_kernels", lambda arch: [OTHER_KERNEL])
    (other,) = package_build.build_all(["sm_100f"], tmp_path)
    assert {path.name for path in tmp_path.glob("*.cubin")} == {hopper.name, other.name}
    assert len(json.loads((tmp_path / MANIFEST).read_text())["cubins"]) == 2


def test_a_failed_build_leaves_what_was_there(
    tmp_path: Path, one_kernel: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_build.build_all(["sm_90a"], tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(kernel: KernelSource, arch: str) -> CompiledKernel:
        raise BackendBuildError(kernel.name, "no")

    monkeypatch.setattr(package_build, "compile_kernel", fail)
    monkeypatch.setattr(package_build, "packaged_kernels", lambda arch: [KERNEL, OTHER_KERNEL])
    with pytest.raises(BackendBuildError):
        package_build.build_all(["sm_90a"], tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_manifest_says_what_the_compiler_said(tmp_path: Path, one_kernel: KernelSource) -> None:
    package_build.build_all(["sm_90a"], tmp_path)
    (row,) = json.loads((tmp_path / MANIFEST).read_text())["cubins"].values()
    assert (row["registers"], row["stack"], row["spills"]) == (40, 16, 8)
    assert (row["threads"], row["parameters"], row["shared"]) == (
        SIZES.threads,
        SIZES.parameters,
        [*SIZES.shared],
    )
