"""The cubins in the package: content-addressed files, and the manifest that names them.

``manifest.json`` is the only place where a kernel's readable name stands. It maps
``<kernel>.<arch>`` to the file (``<first 16 hex digits of the content's sha256>.cubin``) and ties
it to the sources it was compiled from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kdacore_cuda.build.cubin_contents import LaunchSizes
from kdacore_cuda.build.kernel_source import KernelSource

FOLDER = Path(__file__).parent.parent / "cubins"
MANIFEST = "manifest.json"

Row = dict[str, Any]
"""What the manifest says of one cubin. ``file``: its name; ``source``: the key of its sources
(:func:`kdacore_cuda.build.kernel_source.source_key`); ``sha256``: of its content; ``nvrtc``: the
compiler's version; ``registers``, ``stack``, ``spills``: of one thread, the last two in bytes; ``threads``,
``parameters``, ``shared``: :class:`kdacore_cuda.build.cubin_contents.LaunchSizes`."""
_REQUIRED = ("file", "source", "sha256")
_FILE_NAME = re.compile(r"[0-9a-f]{16}\.cubin")


def row_name(kernel: KernelSource, arch: str) -> str:
    """The manifest's key for ``kernel`` compiled for ``arch``."""
    return f"{kernel.name}.{arch}"


def row_arch(name: str) -> str:
    """The architecture in a key of the manifest."""
    return name.rpartition(".")[2]


def file_name(cubin: bytes) -> str:
    """The name of the file that holds this content."""
    return f"{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"


def is_cubin_file(path: Path) -> bool:
    """Whether ``path`` is named as :func:`file_name` names files."""
    return _FILE_NAME.fullmatch(path.name) is not None


def read_manifest(folder: Path = FOLDER) -> dict[str, Row]:
    """The manifest's valid rows by key. Empty when the manifest is missing or damaged; raises
    nothing."""
    try:
        document = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    rows = document.get("cubins") if isinstance(document, dict) else None
    return {name: row for name, row in rows.items() if _is_valid(row)} if isinstance(rows, dict) else {}


def _is_valid(row: object) -> bool:
    """Whether a row has what :func:`load_row` needs, and its file is one of the folder."""
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in _REQUIRED)
        and _FILE_NAME.fullmatch(row["file"]) is not None
    )


def write_manifest(folder: Path, rows: Mapping[str, Row]) -> None:
    """Replace the manifest of ``folder``. OSError when it cannot be written."""
    text = json.dumps({"cubins": dict(sorted(rows.items()))}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text)
    cached_manifest.cache_clear()


cached_manifest = cache(read_manifest)
"""As :func:`read_manifest`, read once per process and folder."""


def find_packaged(kernel: KernelSource, arch: str, key: str, folder: Path = FOLDER) -> bytes | None:
    """The packaged cubin of ``kernel`` for ``arch``.

    None when there is none, when its file is missing or damaged, or when ``key`` (the kernel's
    present :func:`kdacore_cuda.build.kernel_source.source_key`) is not that of the sources it was
    compiled from.
    """
    return load_row(cached_manifest(folder).get(row_name(kernel, arch)), key, folder)


def find_packaged_sizes(
    kernel: KernelSource, arch: str, key: str, folder: Path = FOLDER
) -> LaunchSizes | None:
    """The sizes of launches that the manifest records. None when there are none, or when ``key`` is not that of the
    sources they were read from."""
    row = cached_manifest(folder).get(row_name(kernel, arch))
    return recorded_sizes(row) if row is not None and row["source"] == key else None


def recorded_sizes(row: Row) -> LaunchSizes | None:
    """Those of one row of the manifest; None when it has none, or not only numbers."""
    shared = row.get("shared")
    numbers = [row.get("threads"), row.get("parameters"), *shared] if isinstance(shared, list) else [None]
    if not all(isinstance(number, int) for number in numbers):
        return None
    return LaunchSizes(row["threads"], row["parameters"], tuple(row["shared"]))


def load_row(row: Row | None, key: str, folder: Path) -> bytes | None:
    """The cubin of one row of the manifest; None as in :func:`find_packaged`."""
    if row is None or row["source"] != key:
        return None
    try:
        cubin = (folder / row["file"]).read_bytes()
    except OSError:
        return None
    return cubin if hashlib.sha256(cubin).hexdigest() == row["sha256"] else None
