"""Kernel sources to cubins with NVRTC (``cuda.bindings``). Needs no GPU, no driver and no nvcc."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from kdacore.errors import BackendBuildError
from kdacore.lazy import install_line
from kdacore_cuda.architectures import FIRST_ARCH
from kdacore_cuda.build.kernel_source import KernelSource, gather_headers, nvrtc_options

_ARCH = re.compile(r"sm_(\d+)[af]?")
_USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


class ResourceUsage(NamedTuple):
    """What one thread of a kernel uses, as the assembler reports it."""

    registers: int
    stack: int
    """Bytes of stack."""
    spills: int
    """Bytes of spill stores."""


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and the compiler's log."""

    cubin: bytes
    log: str

    def usage(self) -> ResourceUsage:
        """Registers, stack and spills, read from the log. BackendBuildError when the log does not
        contain them."""
        found = _USAGE.search(self.log)
        if found is None:
            log = f"no registers and spills in the assembler's log:\n{self.log}"
            raise BackendBuildError("a kernel", log)
        stack, spills, registers = map(int, found.groups())
        return ResourceUsage(registers, stack, spills)


def nvrtc_version() -> str:
    """``major.minor`` of the NVRTC library. Raises BackendBuildError when it is not installed."""
    return _nvrtc()[1]


def arch_problem(arch: str) -> str | None:
    """Why kernels cannot be built for ``arch``, or None. BackendBuildError when NVRTC is not
    installed."""
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


def compile_kernel(kernel: KernelSource, arch: str) -> CompiledKernel:
    """Compile ``kernel`` for the real architecture ``arch``, without looking in any cache.

    Raises:
        BackendBuildError: NVRTC is missing or reports an error; carries its whole log.
        ValueError: ``arch`` is not a real architecture.
    """
    source = kernel.read()
    return compile_text(source, kernel.name, nvrtc_options(kernel, arch), gather_headers(source))


def compile_text(
    source: str, name: str, options: Iterable[str], headers: Mapping[str, str]
) -> CompiledKernel:
    """One NVRTC run over text in memory.

    Args:
        source: CUDA C++.
        name: what to call it in messages.
        options: NVRTC's command line.
        headers: include name -> text.

    Raises:
        BackendBuildError: NVRTC is missing or reports an error; carries its whole log.
    """
    nvrtc, _ = _nvrtc()
    options = tuple(options)
    program = _call(
        *(name, "nvrtcCreateProgram", source.encode(), f"{name}.cu".encode(), len(headers)),
        [text.encode() for text in headers.values()],
        [include.encode() for include in headers],
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [x.encode() for x in options])
        log = _read(program, "ProgramLog", name).decode(errors="replace").strip("\0\n ")
        if int(status) != 0:
            raise BackendBuildError(f"{name} ({' '.join(options)})", log or str(status))
        return CompiledKernel(_read(program, "CUBIN", name), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def _nvrtc() -> tuple[Any, str]:
    """The bindings and the library's version."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        log = f"the NVRTC bindings are not installed ({error}); {install_line('cuda')}"
        raise BackendBuildError("CUDA kernels", log) from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        log = f"the NVRTC library is not installed ({error}); pip install nvidia-cuda-nvrtc"
        raise BackendBuildError("CUDA kernels", log) from error
    if int(status) != 0:
        raise BackendBuildError("CUDA kernels", f"nvrtcVersion returned {status}")
    return nvrtc, f"{major}.{minor}"


def _read(program: Any, what: str, name: str) -> bytes:
    """A result of ``program``: ``ProgramLog`` or ``CUBIN``."""
    size: int = _call(name, f"nvrtcGet{what}Size", program)
    # The bindings write into the bytes object itself. One byte more than needed, because Python
    # shares one object among all uses of a single-byte value: an empty log would turn b" " into a
    # zero in the whole process.
    buffer = b" " * (size + 1)
    _call(name, f"nvrtcGet{what}", program, buffer)
    return buffer[:size]


def _call(name: str, function: str, *arguments: object) -> Any:
    """What a function of NVRTC returns, if anything. BackendBuildError of the kernel ``name`` when it fails."""
    status, *result = getattr(_nvrtc()[0], function)(*arguments)
    if int(status) != 0:
        raise BackendBuildError(name, f"{function} returned {status}")
    return result[0] if result else None
