"""A driver library that records launches instead of making them, and both executors on it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.packaged_executors import find_executor
from kdacore_cuda.kernel_parameters import ParamStruct
from kdacore_cuda.runtime import driver, executor, torch_launch
from kdacore_cuda.runtime import program as programs
from kdacore_cuda.runtime.driver import Driver
from kdacore_cuda.runtime.executor import Executor
from kdacore_cuda.runtime.native_executor import NativeExecutor
from kdacore_cuda.runtime.python_executor import PythonExecutor

EXECUTORS = ("native", "python")
_MOST = 64
"""Launches that the library has room for."""
_SOURCE = """
#include <string.h>
#include <stddef.h>
static const char* names[] = {NAMES};
static const int sizes[] = {SIZES};
struct Launch {
  int kernel, attribute; unsigned grid, block, shared, attributes; void* stream; unsigned char params[1024]; };
struct Launch launched[MOST];
int launches, limits[64], loads, fail, nowhere, multiprocessors = 132, capability = 90;
char code_loaded[256];
void* current;
int cuCtxGetCurrent(void** c) { *c = current; return 0; }
int cuCtxGetDevice(int* device) {
  if (nowhere && !current) return 201;
  *device = current ? (int)((long)current - 0x100) : 0;
  return 0; }
int cuCtxPushCurrent_v2(void* c) { current = c; return 0; }
int cuCtxPopCurrent_v2(void** c) { *c = current; current = 0; return 0; }
int cuCtxSetCurrent(void* c) { current = c; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 16 ? multiprocessors : attribute == 75 ? capability / 10 : capability % 10; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(0x100L + device); return 0; }
int cuGetErrorName(int code, const char** text) { *text = "CUDA_ERROR_STUB"; return 0; }
int cuKernelSetAttribute(int what, int value, void* k, int device) { limits[(long)k - 1] = value; return 0; }
int cuLibraryGetKernel(void** k, void* l, const char* name) {
  for (int i = 0; i < sizeof(sizes) / sizeof(int); ++i)
    if (!strcmp(name, names[i])) { *k = (void*)(i + 1L); return 0; }
  return 500; }
int cuLibraryLoadData(void** l, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  *l = (void*)1; ++loads; strncpy(code_loaded, code, sizeof code_loaded - 1); return 0; }
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t size, void* stream) { memcpy(to, from, size); return 0; }
int cuMemsetD8Async(void* at, unsigned char value, size_t size, void* stream) { memset(at, value, size); return 0; }
int cuStreamGetCtx(void* s, void** c) { *c = 0; return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return 0; }
int cuLaunchKernelEx(const unsigned* config, void* f, void** arguments, void** extra) {
  if (launches == MOST) return 500;
  struct Launch* x = &launched[launches++];
  x->kernel = (long)f - 1; x->grid = config[0]; x->block = config[3]; x->shared = config[6];
  x->stream = *(void**)(config + 8); x->attributes = config[12];
  x->attribute = x->attributes ? **(int**)(config + 10) : -1;
  memcpy(x->params, arguments[0], sizes[x->kernel]);
  return fail; }
"""


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("kernel", "attribute")),
        *((name, ctypes.c_uint) for name in ("grid", "block", "shared", "attributes")),
        ("stream", ctypes.c_void_p),
        ("params", ctypes.c_ubyte * 1024),
    )


class Seen(NamedTuple):
    """A launch as the driver saw it."""

    entry: str
    grid: int
    block: int
    shared: int
    limit: int
    params: dict[str, Any]
    stream: int
    attributes: tuple[int, ...]


class Stub:
    """The compiled library, for kernels of these entries and parameters, and a copy of the native executor that no
    other test's driver is open in."""

    def __init__(self, folder: Path, params: Mapping[str, ParamStruct], more: str = "") -> None:
        """``more``: further functions of the driver, in C."""
        assert shutil.which("gcc"), "the CUDA backend's tests need gcc and g++"
        names, sizes = (
            ", ".join(f'"{name}"' for name in params),
            ", ".join(str(x.size) for x in params.values()),
        )
        text = _SOURCE.replace("NAMES", names).replace("SIZES", sizes).replace("MOST", str(_MOST))
        (folder / "stub.c").write_text(text + more)
        self.path, self._params = folder / "libcuda.so.1", dict(params)
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", folder / "stub.c", "-o", self.path], check=True)
        self.library = ctypes.CDLL(str(self.path))
        packaged = find_executor()
        assert isinstance(packaged, Path), packaged
        self._executor = Path(shutil.copy(packaged, folder))

    def number(self, name: str) -> ctypes.c_int:
        """A variable of the library."""
        return ctypes.c_int.in_dll(self.library, name)

    @property
    def context(self) -> int:
        """The current one; 0x100 and the device's number where one was made current."""
        return ctypes.c_void_p.in_dll(self.library, "current").value or 0

    @property
    def limits(self) -> dict[str, int]:
        """Bytes of shared memory that kernels were allowed, by entry; 0 where nothing was said."""
        return dict(zip(self._params, (ctypes.c_int * 64).in_dll(self.library, "limits"), strict=False))

    @property
    def code_loaded(self) -> str:
        """The machine code that was loaded last."""
        return (ctypes.c_char * 256).in_dll(self.library, "code_loaded").value.decode()

    def reset(self) -> None:
        """Forget what was launched, and refuse nothing."""
        for name in ("launches", "loads", "fail", "nowhere"):
            self.number(name).value = 0
        ctypes.memset((ctypes.c_int * 64).in_dll(self.library, "limits"), 0, 4 * 64)
        ctypes.c_void_p.in_dll(self.library, "current").value = None

    def __call__(self) -> list[Seen]:
        """What was launched, in order."""
        found = (_Launch * _MOST).in_dll(self.library, "launched")
        return [self._seen(found[i]) for i in range(self.number("launches").value)]

    def _seen(self, x: Any) -> Seen:
        entry = list(self._params)[x.kernel]
        struct = self._params[entry]
        values = struct.packer.unpack(bytes(x.params[: struct.size]))
        named = dict(zip(struct.offsets, values, strict=True))
        attributes = (x.attribute,) * x.attributes
        return Seen(entry, x.grid, x.block, x.shared, self.limits[entry], named, x.stream or 0, attributes)

    def install(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        """Launches go through an executor of this kind to the library. Kernels' names are their machine code."""
        self.reset()
        here = Driver(str(self.path))
        made: Executor = (
            NativeExecutor(self._executor, str(self.path)) if kind == "native" else PythonExecutor(here)
        )
        monkeypatch.setattr(driver, "driver", lambda: here)
        monkeypatch.setattr(executor, "executor", lambda: made)
        monkeypatch.setattr(executor, "_starts", {})
        for module in (programs, torch_launch):
            monkeypatch.setattr(module, "cubin_of", _cubin_of)


def _cubin_of(kernel: KernelSource, arch: str) -> tuple[int, bytes]:
    code = f"{kernel.name}.{arch}\0".encode()
    return programs.cubin_id(code), code
