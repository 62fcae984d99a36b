"""Compiling the packaged executors: ``python -m kdacore_cuda.build.compile_executors``.

Needs the packages ``ziglang``, which compiles for every machine from any, and ``jaxlib``, which ships
XLA's header. The same ``ziglang`` gives the same bytes everywhere.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kdacore.errors import BackendBuildError
from kdacore_cuda.build.packaged_executors import FOLDER, MACHINES, SOURCES, executors_in, source_hash
from kdacore_cuda.build.packaged_files import Row

OPTIONS = [
    "-std=c11",
    "-O2",
    "-g0",
    "-s",
    "-fPIC",
    "-shared",
    "-fvisibility=default",
    "-Wall",
    "-Wextra",
    "-Werror",
]
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
        sources = sorted(path.name for path in SOURCES.glob("*.c"))
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *OPTIONS]
        command += ["-I.", *sources, "-o", "executor.so", *LIBRARIES]
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
    executors, compiler = executors_in(folder), {"ziglang": importlib.metadata.version("ziglang")}
    rows = {
        machine: executors.add(compile_executor(target), source_hash()) | {"target": target} | compiler
        for machine, target in MACHINES.items()
    }
    executors.write_manifest(rows)
    return rows


if __name__ == "__main__":
    for machine, row in build_all().items():
        print(f"{machine}: {row['file']}")
