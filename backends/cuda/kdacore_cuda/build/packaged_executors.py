"""The compiled executors in the package: a library for each machine. Rows of their manifest also have the ``target``
and the version of ``ziglang`` they were compiled for and by."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

from kdacore_cuda.build.packaged_files import PackagedFiles

SOURCES = Path(__file__).parent.parent / "csrc" / "executor"
FOLDER = Path(__file__).parent.parent / "executors"
MACHINES = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17"}
"""Machines as ``platform.machine()`` names them -> what is compiled for: Linux with that glibc or a
later one."""


def executors_in(folder: Path = FOLDER) -> PackagedFiles:
    """The executors of a folder, by machine."""
    return PackagedFiles(folder, "executors", ".so")


def source_hash() -> str:
    """sha256 (hex) of the executor's sources. OSError when one is missing."""
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]")))
    return hashlib.sha256(text).hexdigest()


def find_executor(folder: Path = FOLDER) -> Path | str:
    """The library for this machine, or why there is none to load.

    One that was compiled from other sources than :data:`SOURCES`, or that is damaged, is not loaded.
    """
    machine, executors = platform.machine(), executors_in(folder)
    row = executors.rows().get(machine) if sys.platform == "linux" else None
    if row is None:
        return f"none is packaged for {sys.platform} on {machine}"
    found = executors.read(row, source_hash())
    return found if isinstance(found, str) else folder / row["file"]
