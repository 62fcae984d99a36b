"""Cubins packaged with the wheel, and the manifest that ties each to the sources it was built from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from kdacore_cuda.build import KernelSource, compile_kernel, nvrtc_version, source_key

FOLDER = Path(__file__).parent / "cubins"
MANIFEST = "manifest.json"
PACKAGED_ARCHS = ("sm_90a", "sm_100f")


@cache
def _manifest(folder: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return {"cubins": {}}
    return loaded


def find_packaged(kernel: KernelSource, arch: str, key: str, folder: Path = FOLDER) -> bytes | None:
    """The packaged cubin, or None when there is none or the sources have changed since it was built."""
    row = _manifest(folder)["cubins"].get(f"{kernel.name}.{arch}")
    if row is None or row["source"] != key:
        return None
    cubin = (folder / row["file"]).read_bytes()
    return cubin if hashlib.sha256(cubin).hexdigest() == row["sha256"] else None


def build_all(
    archs: Iterable[str] = PACKAGED_ARCHS,
    folder: Path = FOLDER,
    report: Callable[[str], None] | None = None,
) -> list[Path]:
    """Compile every packaged kernel for ``archs`` into ``folder`` with a fresh manifest. Needs no GPU.

    Kernels that do not exist for an architecture are left out of it. Cubins whose sources are unchanged are kept.

    Args:
        archs: real architectures, for example ``("sm_90a", "sm_100f")``.
        folder: where cubins and ``manifest.json`` go; anything else there ending in ``.cubin`` is removed.
        report: called with one line per kernel.

    Raises:
        BackendBuildError: with the compiler's log; nothing is removed then.
    """
    from kdacore_cuda.variants import packaged_kernels

    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    for arch in archs:
        for kernel in packaged_kernels(arch):
            key = source_key(kernel, arch)
            cubin = find_packaged(kernel, arch, key, folder)
            kept = cubin is not None
            if cubin is None:
                cubin = compile_kernel(kernel, arch).cubin
            name = f"{kernel.name}.{arch}"
            (folder / f"{name}.cubin").write_bytes(cubin)
            rows[name] = {
                "file": f"{name}.cubin",
                "source": key,
                "sha256": hashlib.sha256(cubin).hexdigest(),
                "nvrtc": nvrtc_version(),
            }
            if report is not None:
                report(f"{name}: {len(cubin)} bytes{', unchanged' if kept else ''}")
    (folder / MANIFEST).write_text(json.dumps({"cubins": dict(sorted(rows.items()))}, indent=1) + "\n")
    _manifest.cache_clear()
    for stale in folder.glob("*.cubin"):
        if stale.stem not in rows:
            stale.unlink()
    return [folder / row["file"] for row in rows.values()]
