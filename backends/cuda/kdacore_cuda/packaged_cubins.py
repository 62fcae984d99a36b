"""Cubins packaged with the wheel, and the manifest that ties each to the sources it was built from."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from kdacore_cuda.build import KernelSource, compile_kernel, nvrtc_version, source_key

FOLDER = Path(__file__).parent / "cubins"
MANIFEST = "manifest.json"
PACKAGED_ARCHS = ("sm_90a", "sm_100f")

Row = dict[str, Any]
"""What the manifest says of one cubin: its file, the key of its sources, its digest, the compiler's version, and a
thread's registers and bytes of stack and spills."""
_NEEDED = {"file", "source", "sha256"}


def _read(folder: Path) -> dict[str, Row]:
    """The manifest's rows by cubin, those that are whole. Missing or damaged: none."""
    try:
        rows = json.loads((folder / MANIFEST).read_text())["cubins"]
        return {name: row for name, row in rows.items() if row.keys() >= _NEEDED}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


_rows = cache(_read)


def find_packaged(kernel: KernelSource, arch: str, key: str, folder: Path = FOLDER) -> bytes | None:
    """The packaged cubin. None when there is none, it is damaged, or its sources have changed since it was built."""
    return _load(_rows(folder).get(f"{kernel.name}.{arch}"), key, folder)


def _load(row: Row | None, key: str, folder: Path) -> bytes | None:
    if row is None or row["source"] != key:
        return None
    try:
        cubin = (folder / row["file"]).read_bytes()
    except (OSError, TypeError, ValueError):
        return None
    return cubin if hashlib.sha256(cubin).hexdigest() == row["sha256"] else None


def build_all(
    archs: Iterable[str] = PACKAGED_ARCHS,
    folder: Path = FOLDER,
    report: Callable[[str], None] | None = None,
) -> list[Path]:
    """Compile every packaged kernel for ``archs`` into ``folder``, beside those of other architectures. Needs no GPU.

    Kernels that do not exist for an architecture are left out of it. Cubins whose sources are unchanged are kept.

    Args:
        archs: real architectures, for example ``("sm_90a", "sm_100f")``.
        folder: where cubins and ``manifest.json`` go. Other cubins of ``archs`` there are removed.
        report: called with one line per kernel.

    Returns:
        The cubins of ``archs``.

    Raises:
        BackendBuildError: with the compiler's log; nothing is removed then.
        OSError: the folder cannot be written.
    """
    from kdacore_cuda.variants import packaged_kernels

    archs = tuple(archs)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # before minutes of compiling
        pass
    before, rows = _read(folder), {}
    for arch in archs:
        for kernel in packaged_kernels(arch):
            key, name = source_key(kernel, arch), f"{kernel.name}.{arch}"
            cubin, row = _load(before.get(name), key, folder), before.get(name, {})
            kept = cubin is not None and "spills" in row
            if cubin is None or not kept:
                built = compile_kernel(kernel, arch)
                cubin, used = built.cubin, built.usage()
                row = {
                    "file": f"{name}.cubin",
                    "source": key,
                    "sha256": hashlib.sha256(cubin).hexdigest(),
                    "nvrtc": nvrtc_version(),
                    **used._asdict(),
                }
                (folder / row["file"]).write_bytes(cubin)
            rows[name] = row
            if report is not None:
                report(f"{name}: {len(cubin)} bytes{', unchanged' if kept else ''}")
    others = {name: row for name, row in before.items() if arch_of(name) not in archs}
    (folder / MANIFEST).write_text(
        json.dumps({"cubins": dict(sorted((others | rows).items()))}, indent=1) + "\n"
    )
    _rows.cache_clear()
    for stale in folder.glob("*.cubin"):
        if arch_of(stale.stem) in archs and stale.stem not in rows:
            stale.unlink()
    return [folder / row["file"] for row in rows.values()]


def arch_of(name: str) -> str:
    """The architecture of a cubin, from its name in the manifest."""
    return name.rpartition(".")[2]
