"""The cubins in the package, and what their manifest records of them.

Its rows have, besides those of every packaged file: ``nvrtc``: the compiler's version; ``registers``, ``stack``,
``spills``: of one thread, the last two in bytes; ``threads``, ``parameters``, ``shared``:
:class:`kdacore_cuda.build.launch_sizes.LaunchSizes`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.packaged_files import PackagedFiles, Row

FOLDER = Path(__file__).parent.parent / "cubins"


def cubins_in(folder: Path) -> PackagedFiles:
    """The cubins of a folder."""
    return PackagedFiles(folder, "cubins", ".cubin")


CUBINS = cubins_in(FOLDER)


@cache
def cached_rows(cubins: PackagedFiles) -> dict[str, Row]:
    """The manifest's rows, read once per process."""
    return cubins.rows()


def row_name(kernel: KernelSource, arch: str) -> str:
    """The manifest's key for ``kernel`` compiled for ``arch``."""
    return f"{kernel.name}.{arch}"


def find_packaged(kernel: KernelSource, arch: str, key: str, cubins: PackagedFiles = CUBINS) -> bytes | None:
    """The packaged cubin of ``kernel`` for ``arch``.

    None when there is none, when its file is missing or damaged, or when ``key`` (the kernel's
    present :func:`kdacore_cuda.build.kernel_source.source_key`) is not that of the sources it was
    compiled from.
    """
    found = cubins.read(cached_rows(cubins).get(row_name(kernel, arch)), key)
    return None if isinstance(found, str) else found
