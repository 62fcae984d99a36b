"""Which wheel is built: with compiled files for one machine, or without any.

``KDACORE_WHEEL`` says ``x86_64`` or ``aarch64`` for Linux with glibc, or ``any`` for everything else; without it, a
wheel for this machine is built. Compiled files are the CUDA kernels, and the executor that launches them, which is
loaded by ctypes and so serves every Python. The wheel for every machine has neither: kernels are compiled by NVRTC when
they are first called, and launched by Python.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "backends/cuda/kdacore_cuda"
GLIBC = "2_17"
"""That the executors are compiled against."""


class Hook(BuildHookInterface[Any]):
    """Adds the compiled files that ``exclude`` in pyproject.toml leaves out."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Raises ValueError where the machine asked for has no executor in the source tree."""
        if version == "editable":
            return
        package = Path(self.root) / PACKAGE
        manifest = package / "executors" / "manifest.json"
        rows = json.loads(manifest.read_text())["executors"] if manifest.is_file() else {}
        compiled = {machine: package / "executors" / row["file"] for machine, row in rows.items()}
        compiled = {machine: path for machine, path in compiled.items() if path.is_file()}
        machine = os.environ.get("KDACORE_WHEEL") or _here(compiled)
        if machine == "any":
            return
        if machine not in compiled:
            raise ValueError(
                f"KDACORE_WHEEL={machine}: expected any or one of {', '.join(compiled) or 'none'}"
            )
        build_data["tag"] = f"py3-none-manylinux_{GLIBC}_{machine}"
        for path in (compiled[machine], *sorted((package / "cubins").glob("*.cubin"))):
            build_data["force_include"][str(path)] = str(path.relative_to(package.parent))


def _here(compiled: dict[str, Path]) -> str:
    machine = platform.machine()
    has_glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    return machine if has_glibc and machine in compiled else "any"
