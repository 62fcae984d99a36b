"""Compiling the packaged executors: ``python -m kdacore_cuda.build.compile_executors``.

Needs the packages ``ziglang``, which compiles for every machine from any, and ``jaxlib``, which ships
XLA's header. The same ``ziglang`` gives the same bytes everywhere.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kdacore.errors import BackendBuildError
from kdacore_cuda.build.packaged_executors import (
    FOLDER,
    MACHINES,
    SOURCES,
    Row,
    file_name,
    source_hash,
    write_manifest,
)

OPTIONS = (
    *("-std=c11", "-O2", "-g0", "-s", "-fPIC", "-shared", "-fvisibility=default"),
    *("-Wall", "-Wextra", "-Werror"),
)
LIBRARIES = ("-ldl", "-lpthread")


def compile_executor(target: str) -> bytes:
    """The executor's library for one of the targets of :data:`MACHINES`.

    Raises:
        BackendBuildError: with the compiler's output.
        ImportError: ``jax`` is not installed.
    """
    import jax.ffi

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # All are named without their folders, so that no path can get into the library.
        shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
        shutil.copytree(Path(jax.ffi.include_dir()) / "xla" / "ffi", folder / "xla" / "ffi")
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *OPTIONS]
        command += [
            "-I.",
            *sorted(path.name for path in SOURCES.glob("*.c")),
            "-o",
            "executor.so",
            *LIBRARIES,
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise BackendBuildError(f"the executor for {target}", done.stderr)
        return (folder / "executor.so").read_bytes()


def build_all(folder: Path = FOLDER) -> dict[str, Row]:
    """Compile the executor for every machine into ``folder``, and write the manifest there.

    Libraries that it does not name are removed. Raises as :func:`compile_executor`, and OSError when
    the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Row] = {}
    for machine, target in MACHINES.items():
        library = compile_executor(target)
        rows[machine] = {
            "file": file_name(library),
            "source": source_hash(),
            "sha256": hashlib.sha256(library).hexdigest(),
            "target": target,
            "ziglang": importlib.metadata.version("ziglang"),
        }
        (folder / rows[machine]["file"]).write_bytes(library)
    write_manifest(folder, rows)
    named = {row["file"] for row in rows.values()}
    for path in folder.glob("*.so"):
        if path.name not in named:
            path.unlink()
    return rows


if __name__ == "__main__":
    for machine, row in build_all().items():
        print(f"{machine}: {row['file']}")
