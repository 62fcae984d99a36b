"""Runs the real kernel sources on the CPU: compiled by g++ against ``emulation/emulate.h`` instead of PTX."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from kdacore_cuda import layout
from kdacore_cuda.build import CSRC, KernelSource, gather_headers

HERE = Path(__file__).parent / "emulation"
COMPILE = ("g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing")

_RUNNER = """
#include <cstddef>
#define KDACORE_EMULATE
#include "{path}"
extern "C" void run({params} p, int grid, int cluster, int threads, int shared, unsigned seed) {{
  emu::run([&] {{ {entry}(p); }}, grid, cluster, threads, shared, seed);
}}
extern "C" size_t offset_of(int field) {{
  const size_t offsets[] = {{ {offsets} }};
  return offsets[field];
}}
"""


@cache
def build(kernel: KernelSource, params: layout.ParamStruct) -> ctypes.CDLL:
    """The kernel as a shared library with ``run`` and ``offset_of``; cached in the temporary folder by content."""
    offsets = ", ".join(f"offsetof({params.name}, {name})" for name, _ in params.fields)
    text = _RUNNER.format(path=kernel.path, params=params.name, entry=kernel.entry, offsets=offsets)
    headers = gather_headers((CSRC / kernel.path).read_text())
    flags = [f"-D{key}={value}" for key, value in kernel.defines]
    digest = hashlib.sha256(
        "\0".join(
            [
                text,
                (CSRC / kernel.path).read_text(),
                (HERE / "emulate.h").read_text(),
                *headers.values(),
                *flags,
            ]
        ).encode()
    ).hexdigest()[:24]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for include, body in headers.items():
            (folder / include).parent.mkdir(parents=True, exist_ok=True)
            (folder / include).write_text(body)
        (folder / kernel.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / kernel.path).write_text((CSRC / kernel.path).read_text())
        (folder / "runner.cpp").write_text(text)
        library = folder / f"{digest}.so"
        command = [
            *COMPILE,
            *flags,
            f"-I{folder}",
            f"-I{HERE}",
            str(folder / "runner.cpp"),
            "-o",
            str(library),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"g++ failed on {kernel.name}:\n{done.stderr}")
        return ctypes.CDLL(str(library))


def run(
    kernel: KernelSource,
    params: layout.ParamStruct,
    values: tuple[float, ...],
    *,
    grid: int,
    threads: int,
    shared: int,
    cluster: int = 1,
    seed: int = 0,
) -> None:
    """One launch. ``values`` are what the host would pack, pointers to host memory."""
    library = build(kernel, params)
    block = (ctypes.c_char * params.size).from_buffer_copy(params.packer.pack(*values))
    struct = type(
        params.name, (ctypes.Structure,), {"_fields_": [("data", ctypes.c_uint64 * (params.size // 8))]}
    )
    library.run.argtypes = [struct, *([ctypes.c_int] * 4), ctypes.c_uint]
    library.run(struct.from_buffer_copy(block), grid, cluster, threads, shared, seed)
