"""Runs the real kernel sources on the CPU: compiled by g++ against ``emulation/emulate.h`` instead of PTX."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from kdacore_cuda import kernel_parameters
from kdacore_cuda.build.kernel_source import CSRC, EVERY_LANE, KernelSource, gather_headers
from kdacore_cuda.build.launch_sizes import LaunchSizes
from kdacore_cuda.kernel_parameters import ParamStruct

HERE = Path(__file__).parent / "emulation"
STRUCTS = {x.name: x for x in vars(kernel_parameters).values() if isinstance(x, ParamStruct)}
"""Structs of parameters, by their names in C."""
_CHOSEN = {
    "RecurrentOf": ("RecurrentParams", "RecurrentRecordsParams"),
    "DecodeOf": ("DecodeParams", "DecodeRecordsParams"),
}
"""Those that depend on the macro RECORDS, by the name of what chooses."""
COMPILE = (
    "g++",
    "-std=c++17",
    "-O1",
    "-w",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",
    "-fno-strict-aliasing",
    "-fstack-reuse=none",
)
RUNTIME_COMPILE = ("-O3",)
"""More for what runs the kernels: it multiplies matrices."""

INSTRUCTIONS = (
    "common/decode/cluster_exchange.cuh",
    "common/ptx.cuh",
    "sm90/bf16_pairs.cuh",
    "sm90/bulk_copies.cuh",
    "sm90/evict_first_copies.cuh",
    "sm90/polling.cuh",
    "sm90/small_products.cuh",
    "sm90/warp.cuh",
    "sm90/wgmma.cuh",
)
"""Headers of instructions: ``emulate.h``, which comes before all else, has these functions for the CPU."""

_KEPT_SECONDS = 3 * 24 * 3600.0

FORWARDS, BACKWARDS, SHUFFLED = range(3)
"""Orders in which the clusters of a launch begin; one ends before the next."""

_RUNNER = """
#include "{path}"
#pragma GCC visibility push(default)
extern "C" const char* run({params} p, int grid, int cluster, int threads, int shared, unsigned seed, int dispatch,
    int starved) {{
  emu::dispatch = dispatch;
  emu::starved = starved;
  emu::left_operands_stay = {stay};
  emu::operands_are_f16 = {f16};
  return emu::run([&] {{ {entry}(p); }}, grid, cluster, threads, shared, seed);
}}
extern "C" size_t kept_bytes() {{ return emu::kept_bytes; }}
extern "C" size_t threads_of_block() {{ return block_threads; }}
extern "C" size_t kinds_of_blocks() {{ return sizeof shared_bytes / sizeof *shared_bytes; }}
extern "C" size_t shared_bytes_of(int kind) {{ return shared_bytes[kind]; }}
extern "C" size_t offset_of(int field) {{
  const size_t offsets[] = {{ {offsets} }};
  return offsets[field];
}}
"""


def build(kernel: KernelSource, params: ParamStruct) -> ctypes.CDLL:
    """The kernel as a shared library with the functions of :data:`_RUNNER`; files are kept by content."""
    return _build(kernel, params, f"-DEVERY_LANE={int(os.environ.get(EVERY_LANE) == '1')}")


def params_of(kernel: KernelSource) -> ParamStruct:
    """The struct that the kernel takes by value."""
    (name,) = re.findall(r"KDA_PARAM (\w+)", kernel.read())
    return STRUCTS[_CHOSEN[name][kernel.macros.get("RECORDS", 0)] if name in _CHOSEN else name]


def launch_sizes(kernel: KernelSource) -> LaunchSizes:
    """What the kernel says of itself, as the CPU's compiler sees it."""
    params = params_of(kernel)
    library = build(kernel, params)
    shared = (library.shared_bytes_of(kind) for kind in range(library.kinds_of_blocks()))
    return LaunchSizes(library.threads_of_block(), params.size, tuple(shared))


@cache
def _build(kernel: KernelSource, params: ParamStruct, *more: str) -> ctypes.CDLL:
    offsets = ", ".join(f"offsetof({params.name}, {name})" for name, _ in params.fields)
    # Elsewhere left operands' arrays end before their products do: registers are the compiler's there.
    stay = (
        "true"
        if kernel.path.startswith(
            (
                *("sm90/chunk_backward/", "sm90/chunk_forward/dataflow/", "sm90/chunk_forward/segments/"),
                "sm90/gated_delta/",
            )
        )
        else "false"
    )
    f16 = "true" if kernel.macros.get("HALF_F16") else "false"
    text = _RUNNER.format(
        path=kernel.path, params=params.name, entry=kernel.entry, offsets=offsets, stay=stay, f16=f16
    )
    headers = gather_headers((CSRC / kernel.path).read_text())
    flags = [*(f"-D{key}={value}" for key, value in kernel.macros.items()), *more]
    source = (CSRC / kernel.path).read_text()
    digest = _digest(
        text, source, *_emulation_sources(), *headers.values(), *flags, *COMPILE, *RUNTIME_COMPILE
    )
    kept = _kept()
    if kept is not None and (kept / f"{digest}.so").is_file():
        return ctypes.CDLL(str(kept / f"{digest}.so"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / kernel.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / kernel.path).write_text(source)
        library = compile_library(text, headers, flags, folder, digest)
        if kept is not None:  # whole or not at all: several processes may bring the same one
            coming = kept / f"{digest}.{os.getpid()}"
            shutil.copyfile(library, coming)
            library = coming.replace(kept / f"{digest}.so")
        return ctypes.CDLL(str(library))


@cache
def _kept() -> Path | None:
    """A folder for libraries that only this user can write to; None where there is none. Old ones go."""
    folder = Path(tempfile.gettempdir()) / f"kdacore-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        return None
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


_temporary = functools.cache(tempfile.TemporaryDirectory)
"""This process's own, removed when it ends."""


@cache
def _runtime() -> Path:
    """The folder with what all kernels share: ``runtime.o``, and ``emulate.h`` as ``all.h``. Compiled once by the first
    of several processes; the others wait for it."""
    kept = _kept()
    if kept is None:
        folder = Path(_temporary().name)
        _compile_runtime(folder)
        return folder
    folder = kept / f"runtime-{_digest(*_emulation_sources(), *COMPILE, *RUNTIME_COMPILE)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "runtime.o").is_file():
            _compile_runtime(folder)
    return folder


def _compile_runtime(folder: Path) -> None:
    """``runtime.o`` appears last and whole."""
    header = folder / "all.h"
    header.write_text("#include <emulate.h>\n")
    _compile("-x", "c++-header", str(header), "-o", f"{header}.gch")
    sources = [path.name for path in sorted(HERE.glob("*.cpp"))]
    together = folder / "runtime.cpp"
    together.write_text("".join(f"#include <{name}>\n" for name in ("emulate.h", *sources)))
    _compile(*RUNTIME_COMPILE, "-c", str(together), "-o", str(folder / "coming.o"))
    (folder / "coming.o").replace(folder / "runtime.o")


def _emulation_sources() -> list[str]:
    return [path.read_text() for path in sorted(HERE.iterdir())]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def _compile(*arguments: str) -> None:
    done = subprocess.run([*COMPILE, f"-I{HERE}", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ failed:\n{done.stderr}")


def compile_library(text: str, headers: dict[str, str], flags: list[str], folder: Path, name: str) -> Path:
    """``text`` as a shared library in ``folder``, where the headers go as well."""
    write_headers(headers, folder)
    (folder / "runner.cpp").write_text(text)
    library = folder / f"{name}.so"
    _compile(
        *("-shared", *flags, *_include_options(folder)),
        *(f"{folder}/runner.cpp", f"{_runtime()}/runtime.o", "-o", str(library)),
    )
    return library


def headers_used(text: str, headers: dict[str, str], flags: list[str], folder: Path) -> list[str]:
    """Which of ``headers``, which go to ``folder``, the compiler reads for ``text``."""
    write_headers(headers, folder)
    (folder / "source.cpp").write_text(text)
    (folder / "source.d").unlink(missing_ok=True)
    _compile(
        *("-MM", "-MF", f"{folder}/source.d", *flags, *_include_options(folder), f"{folder}/source.cpp"),
    )
    read = (folder / "source.d").read_text()
    return [name for name in headers if f"{folder}/{name}" in read.split()]


def problems_of(header: str, flags: list[str], folder: Path) -> str:
    """What the compiler says to ``header`` alone; :func:`headers_used` has filled ``folder``."""
    (folder / "source.cpp").write_text(f'#include "{header}"\n')
    options = ("-fsyntax-only", *flags, *_include_options(folder))
    done = subprocess.run(
        [*COMPILE, f"-I{HERE}", *options, f"{folder}/source.cpp"], capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else ""


def write_headers(headers: dict[str, str], folder: Path) -> None:
    """To ``folder``; headers of instructions without what ``emulate.h`` replaces."""
    for include, body in headers.items():
        (folder / include).parent.mkdir(parents=True, exist_ok=True)
        (folder / include).write_text(_includes_of(body) if include in INSTRUCTIONS else body)


def _include_options(folder: Path) -> tuple[str, ...]:
    return (f"-I{folder}", "-include", f"{_runtime()}/all.h")


def _includes_of(header: str) -> str:
    lines = (line for line in header.splitlines() if line.startswith(("#pragma once", "#include")))
    return "".join(f"{line}\n" for line in lines)


def run(
    kernel: KernelSource,
    params: ParamStruct,
    values: tuple[float, ...],
    *,
    grid: int,
    threads: int,
    shared: int,
    cluster: int = 1,
    seed: int = 0,
    dispatch: int = FORWARDS,
    starved: int = -1,
) -> None:
    """One launch. ``values`` are what the host would pack, pointers to host memory; ``dispatch`` says in which order
    clusters begin; the warp ``starved`` of each cluster runs only while no other can."""
    library = build(kernel, params)
    sizes = launch_sizes(kernel)
    if threads != sizes.threads or shared not in sizes.shared:
        raise RuntimeError(f"{kernel.name}: launched with {threads} threads and {shared} bytes, not {sizes}")
    block = (ctypes.c_char * params.size).from_buffer_copy(params.packer.pack(*values))
    struct = type(
        params.name, (ctypes.Structure,), {"_fields_": [("data", ctypes.c_uint64 * (params.size // 8))]}
    )
    library.run.argtypes = [struct, *([ctypes.c_int] * 4), ctypes.c_uint, ctypes.c_int, ctypes.c_int]
    library.run.restype = ctypes.c_char_p
    message = library.run(
        struct.from_buffer_copy(block), grid, cluster, threads, shared, seed, dispatch, starved
    )
    if message is not None:
        raise RuntimeError(f"{kernel.name}: {message.decode()}")
