"""Kernel sources to cubins: NVRTC through ``cuda.bindings``, needing no GPU, no driver and no nvcc.

A cubin is looked for in three places: the ones packaged with the wheel (if their sources are unchanged), the user's
disk cache, and the compiler.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kdacore import config
from kdacore.errors import BackendBuildError
from kdacore_cuda import layout
from kdacore_cuda.cache import DiskCache

CSRC = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
EVERY_LANE = "KDACORE_CUDA_EVERY_LANE"
"""Environment variable: 1 where every lane arrives at barriers, as racecheck needs (csrc/common/warp_arrivals.cuh)."""
_BASE_OPTIONS = (
    "-std=c++17",
    "-default-device",
    "--ptxas-options=-v",
)


@dataclass(frozen=True)
class KernelSource:
    """One cubin to be: a source file under ``csrc`` compiled with these macros. ``entry`` is its only kernel."""

    path: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """A file-name-safe identity, for example ``decode-K128-W4``."""
        parts = [Path(self.path).stem, *(f"{key}{value}" for key, value in self.defines)]
        return "-".join(parts)


class Usage(NamedTuple):
    """What one thread of a kernel takes, as the assembler says: registers, and bytes of stack and of spill stores."""

    registers: int
    stack: int
    spills: int


_USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


@dataclass(frozen=True)
class Built:
    """A cubin and what the compiler said about it."""

    cubin: bytes
    log: str

    def usage(self) -> Usage:
        """From the log. BackendBuildError when it does not say."""
        found = _USAGE.search(self.log)
        if found is None:
            raise BackendBuildError(
                "a kernel", f"no registers and spills in the assembler's log:\n{self.log}"
            )
        stack, spills, registers = map(int, found.groups())
        return Usage(registers, stack, spills)


@cache
def nvrtc_version() -> str:
    """``major.minor`` of the NVRTC library. Raises BackendBuildError when it is not installed."""
    _, version = _nvrtc()
    return version


_ARCH = re.compile(r"sm_(\d+)[af]?")
FIRST_ARCH = 80
"""Compute capability from which the kernels compile: bfloat16 products and asynchronous copies."""


def arch_problem(arch: str) -> str | None:
    """Why kernels cannot be built for ``arch``, or None. BackendBuildError when there is no compiler to ask."""
    found = _ARCH.fullmatch(arch)
    if found is None:
        return "not the name of a real architecture"
    if int(found[1]) < FIRST_ARCH:
        return f"the kernels need sm_{FIRST_ARCH} or later"
    _nvrtc()
    try:
        compile_text('extern "C" __global__ void nothing() {}', "nothing", (f"-arch={arch}",), {})
    except BackendBuildError as error:
        return f"NVRTC {nvrtc_version()} says: {error.log}"
    return None


@cache
def _nvrtc() -> tuple[Any, str]:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        log = f"the NVRTC bindings are not installed ({error}); pip install 'kdacore[cuda]'"
        raise BackendBuildError("CUDA kernels", log) from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        log = f"the NVRTC library is not installed ({error}); pip install nvidia-cuda-nvrtc"
        raise BackendBuildError("CUDA kernels", log) from error
    if int(status) != 0:
        raise BackendBuildError("CUDA kernels", f"nvrtcVersion returned {status}")
    return nvrtc, f"{major}.{minor}"


def gather_headers(source: str) -> dict[str, str]:
    """Every header ``source`` includes, directly or not: include name -> text. Names are relative to ``csrc``."""
    generated = layout.generated_headers()
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        text = generated.get(name)
        if text is None:
            text = (CSRC / name).read_text()
        found[name] = text
        waiting += _INCLUDE.findall(text)
    return dict(sorted(found.items()))


def source_key(kernel: KernelSource, arch: str, csrc: Path = CSRC) -> str:
    """sha256 of everything that shapes the cubin but the compiler: source, headers, macros, options, architecture."""
    source = (csrc / kernel.path).read_text()
    digest = hashlib.sha256()
    for part in (kernel.path, source, *_flatten(gather_headers(source)), *options(kernel, arch)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _flatten(headers: Mapping[str, str]) -> Iterable[str]:
    for name, text in headers.items():
        yield name
        yield text


def options(kernel: KernelSource, arch: str) -> tuple[str, ...]:
    """NVRTC's command line. ``arch`` is a real architecture (``sm_90a``), never a virtual one."""
    if not arch.startswith("sm_"):
        raise ValueError(f"arch must be sm_*, got {arch!r}")
    defines = dict(kernel.defines)
    if config.get().cuda_every_lane:
        defines["EVERY_LANE"] = 1
    return (f"-arch={arch}", *_BASE_OPTIONS, *(f"-D{key}={value}" for key, value in defines.items()))


def compile_kernel(kernel: KernelSource, arch: str) -> Built:
    """Compile now, no cache.

    Raises:
        BackendBuildError: with NVRTC's whole log.
    """
    source = (CSRC / kernel.path).read_text()
    return compile_text(source, kernel.name, options(kernel, arch), gather_headers(source))


def compile_text(source: str, name: str, command: Iterable[str], headers: Mapping[str, str]) -> Built:
    """One NVRTC run over text held in memory."""
    nvrtc, _ = _nvrtc()
    flags = [flag.encode() for flag in command]
    status, program = nvrtc.nvrtcCreateProgram(
        source.encode(),
        f"{name}.cu".encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [include.encode() for include in headers],
    )
    _check(status, name, "nvrtcCreateProgram")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = _read(nvrtc, program, "ProgramLog", name).decode(errors="replace").strip("\0\n ")
        if int(status) != 0:
            raise BackendBuildError(f"{name} ({' '.join(command)})", log or str(status))
        return Built(_read(nvrtc, program, "CUBIN", name), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: Any, program: Any, what: str, name: str) -> bytes:
    size: int
    status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(status, name, f"nvrtcGet{what}Size")
    # The bindings write into a bytes object. One byte more than they need: bytes of a single one are Python's own, the
    # same for everybody, and an empty log would make b" " zero in the whole process.
    buffer = b" " * (size + 1)
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(status, name, f"nvrtcGet{what}")
    return buffer[:size]


def _check(status: Any, name: str, call: str) -> None:
    if int(status) != 0:
        raise BackendBuildError(name, f"{call} returned {status}")


def load_or_compile(kernel: KernelSource, arch: str, disk: DiskCache | None = None) -> bytes:
    """The cubin for ``arch``: packaged, cached or compiled now (and then cached)."""
    from kdacore_cuda.prebuilt import find_packaged

    key = source_key(kernel, arch)
    packaged = find_packaged(kernel, arch, key)
    if packaged is not None:
        return packaged
    disk = DiskCache() if disk is None else disk
    entry = hashlib.sha256(f"{key} nvrtc {nvrtc_version()}".encode()).hexdigest()
    cached = disk.get(entry)
    if cached is not None:
        return cached
    cubin = compile_kernel(kernel, arch).cubin
    disk.put(entry, cubin)
    return cubin
