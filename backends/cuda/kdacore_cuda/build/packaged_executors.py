"""The compiled executors in the package: content-addressed libraries, one for each machine, and the manifest that names
them and ties them to their sources."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent.parent / "csrc" / "executor"
FOLDER = Path(__file__).parent.parent / "executors"
MANIFEST = "manifest.json"
MACHINES = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17"}
"""Machines as ``platform.machine()`` names them -> what is compiled for: Linux with that glibc or a
later one."""

Row = dict[str, Any]
"""What the manifest says of one library. ``file``: its name; ``source``: :func:`source_hash`; ``sha256``: of its
content; ``ziglang``: the compiler's version."""


def source_hash() -> str:
    """sha256 (hex) of the executor's sources. OSError when one is missing."""
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]")))
    return hashlib.sha256(text).hexdigest()


def read_manifest(folder: Path = FOLDER) -> dict[str, Row]:
    """The manifest's rows by machine. Empty when it is missing or damaged; raises nothing."""
    try:
        document = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    rows = document.get("executors") if isinstance(document, dict) else None
    return rows if isinstance(rows, dict) else {}


def write_manifest(folder: Path, rows: dict[str, Row]) -> None:
    """Replace the manifest of ``folder``. OSError when it cannot be written."""
    text = json.dumps({"executors": dict(sorted(rows.items()))}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text)


def file_name(library: bytes) -> str:
    """The name of the file that holds this content."""
    return f"{hashlib.sha256(library).hexdigest()[:16]}.so"


def find_executor(folder: Path = FOLDER) -> Path | str:
    """The library for this machine, or why there is none to load.

    One that was compiled from other sources than :data:`SOURCES`, or that is damaged, is not loaded.
    """
    machine = platform.machine()
    row = read_manifest(folder).get(machine) if sys.platform == "linux" else None
    if not isinstance(row, dict):
        return f"none is packaged for {sys.platform} on {machine}"
    if row.get("source") != source_hash():
        return "the packaged one was compiled from other sources"
    path = folder / Path(str(row.get("file"))).name
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"it cannot be read: {error}"
    if hashlib.sha256(content).hexdigest() != row.get("sha256"):
        return f"{path.name} is damaged"
    return path
