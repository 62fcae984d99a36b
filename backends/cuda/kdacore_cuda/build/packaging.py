"""Compiling the packaged cubins: what ``kdacore build`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kdacore import files
from kdacore.command_types import KernelBuilder
from kdacore_cuda.architectures import PACKAGED_ARCHS, build_arch
from kdacore_cuda.build.compiler import arch_problem, compile_kernel, nvrtc_version
from kdacore_cuda.build.kernel_source import KernelSource, source_key
from kdacore_cuda.build.launch_sizes import read_launch_sizes
from kdacore_cuda.build.packaged_cubins import FOLDER, cached_rows, cubins_in, row_name
from kdacore_cuda.build.packaged_files import MANIFEST, PackagedFiles, Row
from kdacore_cuda.forms.packaged_kernels import packaged_kernels


def builder() -> KernelBuilder:
    """Compiles every packaged kernel with NVRTC."""
    return KernelBuilder(
        "cuda", PACKAGED_ARCHS, FOLDER, problem=lambda arch: arch_problem(build_arch(arch)), build=build_all
    )


def build_all(
    archs: Iterable[str] = PACKAGED_ARCHS,
    folder: Path = FOLDER,
    report: Callable[[str], None] | None = None,
) -> list[Path]:
    """Compile every packaged kernel for ``archs`` into ``folder``. Needs no GPU.

    Kernels that do not exist for an architecture are left out of it. Cubins whose sources are
    unchanged are kept, and so are the manifest's rows for other architectures.

    Args:
        archs: real architectures, for example ``("sm_90a", "sm_100f")``, or those of devices.
        folder: where cubins and ``manifest.json`` go. Cubin files that the new manifest does not
            name are removed.
        report: called with one line per kernel.

    Returns the cubins of ``archs``, in the order of :func:`kdacore_cuda.forms.packaged_kernels.packaged_kernels`.
    Raises BackendBuildError with the compiler's log, the manifest and its files then unchanged, and OSError when the
    folder cannot be written.
    """
    archs, cubins = tuple(dict.fromkeys(map(build_arch, archs))), cubins_in(folder)
    files.check_writable(folder / MANIFEST)  # now rather than after minutes of compiling
    before, rows = cubins.rows(), {}
    for arch in archs:
        for kernel in packaged_kernels(arch):
            name = row_name(kernel, arch)
            rows[name], size, kept = _build(kernel, arch, before.get(name), cubins)
            if report is not None:
                report(f"{name}: {size} bytes{', unchanged' if kept else ''}")
    other_archs = {name: row for name, row in before.items() if name.rpartition(".")[2] not in archs}
    cubins.write_manifest(other_archs | rows)
    cached_rows.cache_clear()
    return [folder / row["file"] for row in rows.values()]


def _build(
    kernel: KernelSource, arch: str, before: Row | None, cubins: PackagedFiles
) -> tuple[Row, int, bool]:
    """The row of one kernel, its cubin's size in bytes, and whether the cubin of the row ``before`` was kept."""
    key = source_key(kernel, arch)
    kept = cubins.read(before, key)
    if before is not None and isinstance(kept, bytes):
        return before, len(kept), True
    built = compile_kernel(kernel, arch)
    sizes = built.usage()._asdict() | read_launch_sizes(built.cubin, kernel.entry)._asdict()
    return cubins.add(built.cubin, key) | {"nvrtc": nvrtc_version()} | sizes, len(built.cubin), False
