"""A CUDA driver library whose launches a Python function makes, and executors that launch through it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from kdacore_cuda.build import packaged_cubins
from kdacore_cuda.build.packaged_executors import find_executor
from kdacore_cuda.runtime import python_executor
from kdacore_cuda.runtime.driver import Driver
from kdacore_cuda.runtime.executor import Executor
from kdacore_cuda.runtime.native_executor import NativeExecutor
from kdacore_cuda.runtime.python_executor import PythonExecutor

_SOURCE = """
#include <stddef.h>
#include <string.h>
typedef int on_launch_t(const void* config, void* kernel, void* parameters);
typedef void on_memory_t(void* to, const void* from, size_t size);
on_launch_t* on_launch;
on_memory_t* on_memory; /* in the place of clearing, from nowhere, and copying */
int multiprocessors = 132, capability = 90, device, loads, limits, modes, cleared;
int fails; const char* failing; /* the result of a function, by its name */
int contexts = 1; /* whether threads have a context from the start */
int capturing; /* whether a stream is captured, in the mode that torch captures in */
__thread int capture_mode;
__thread void* current;
#define CALL(name) if (failing && !strcmp(failing, #name)) return fails
#define UNSAFE_CALL(name) CALL(name); if (capturing && capture_mode != 2) return 900
int cuCtxGetCurrent(void** c) { CALL(cuCtxGetCurrent); *c = current; return 0; }
int cuCtxGetDevice(int* d) {
  CALL(cuCtxGetDevice);
  if (!contexts && !current) return 201;
  *d = (size_t)current >= 0x200 ? (int)((size_t)current - 0x200) : device;
  return 0;
}
int cuCtxPushCurrent_v2(void* c) { CALL(cuCtxPushCurrent_v2); current = c; return 0; }
int cuCtxPopCurrent_v2(void** c) { *c = current; current = 0; return 0; }
int cuCtxSetCurrent(void* c) { CALL(cuCtxSetCurrent); current = c; return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) {
  CALL(cuDeviceGetAttribute);
  *v = a == 16 ? multiprocessors : a == 75 ? capability / 10 : capability % 10;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** c, int d) {
  CALL(cuDevicePrimaryCtxRetain);
  *c = (void*)(size_t)(0x200 + d);
  return 0;
}
int cuGetErrorName(int code, const char** text) { *text = "CUDA_ERROR_STUB"; return 0; }
int cuKernelSetAttribute(int what, int value, void* k, int d) { UNSAFE_CALL(cuKernelSetAttribute); ++limits; return 0; }
int cuLibraryLoadData(void** l, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  UNSAFE_CALL(cuLibraryLoadData);
  ++loads;
  memcpy(l, code, sizeof *l);
  return 0;
}
int cuLibraryGetKernel(void** k, void* l, const char* name) { CALL(cuLibraryGetKernel); *k = l; return 0; }
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t size, void* stream) {
  CALL(cuMemcpyDtoDAsync);
  if (on_memory) on_memory(to, from, size);
  else memcpy(to, from, size);
  return 0;
}
int cuMemsetD8Async(void* at, unsigned char value, size_t size, void* stream) {
  CALL(cuMemsetD8Async);
  ++cleared;
  if (on_memory) on_memory(at, NULL, size);
  else memset(at, value, size);
  return 0;
}
int cuStreamGetCtx(void* s, void** c) { CALL(cuStreamGetCtx); *c = (void*)0x100; return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = capture_mode;
  ++modes;
  capture_mode = *mode;
  *mode = before;
  return 0;
}
int cuLaunchKernelEx(const void* config, void* f, void** arguments, void** extra) {
  CALL(cuLaunchKernelEx);
  return on_launch(config, f, arguments[0]);
}
"""
_P = ctypes.c_void_p


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", _P), ("attributes", _P), ("attribute_count", ctypes.c_uint)),
    )


_OnLaunch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), _P, _P)
_OnMemory = ctypes.CFUNCTYPE(None, _P, _P, ctypes.c_size_t)


class StubDriver:
    """The driver library, compiled into ``folder``.

    Args:
        folder: an empty one.
        on_launch: makes a launch, given its configuration, the kernel's handle (the first 8 bytes of its code) and the
            address of its parameters; what the driver returns.
        on_memory: in the place of copying memory (to, from, bytes) and clearing it (at, None, bytes), if given.
    """

    def __init__(
        self,
        folder: Path,
        on_launch: Callable[[Any, int, int], int],
        on_memory: Callable[[int, int | None, int], None] | None = None,
    ) -> None:
        assert shutil.which("gcc"), "the CUDA backend's tests need gcc and g++"
        (folder / "stub.c").write_text(_SOURCE)
        self.folder, self.path = folder, folder / "libcuda.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", folder / "stub.c", "-o", self.path], check=True)
        self.library = ctypes.CDLL(str(self.path))
        self._callbacks: list[Any] = []
        self._set("on_launch", _OnLaunch(on_launch))
        if on_memory is not None:
            self._set("on_memory", _OnMemory(on_memory))

    def reset(self) -> None:
        """Nothing fails or is captured, all threads have a context, and the device is number 0, an H200."""
        self.fail(None)
        for name, value in (
            ("multiprocessors", 132),
            ("capability", 90),
            ("device", 0),
            ("contexts", 1),
            ("capturing", 0),
        ):
            self.number(name).value = value

    def _set(self, name: str, callback: Any) -> None:
        self._callbacks.append(callback)
        _P.in_dll(self.library, name).value = ctypes.cast(callback, _P).value

    def number(self, name: str) -> ctypes.c_int:
        """A variable of the library."""
        return ctypes.c_int.in_dll(self.library, name)

    def fail(self, call: str | None, code: int = 3) -> None:
        """This function of the driver returns ``code`` from now on; None: all succeed."""
        self._failing = None if call is None else ctypes.create_string_buffer(call.encode())
        _P.in_dll(self.library, "failing").value = self._failing and ctypes.addressof(self._failing)
        self.number("fails").value = code

    def native_executor(self) -> NativeExecutor:
        """The packaged executor, launching here: a library of its own, whose state no other executor shares."""
        found = find_executor()
        assert isinstance(found, Path), found
        copies = len(list(self.folder.glob("executor*.so")))
        return NativeExecutor(Path(shutil.copy(found, self.folder / f"executor{copies}.so")), str(self.path))

    def driver(self) -> Driver:
        """This library as Python calls it."""
        return Driver(str(self.path))


class Launched(NamedTuple):
    """A launch as the driver got it."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: tuple[tuple[int, int], ...]
    """Identity and value of each."""
    parameters: bytes


class Memory(NamedTuple):
    """A copy or, from nowhere, clearing of memory."""

    to: int
    source: int | None
    size: int


class Recorder:
    """A driver that notes what it is told. Code of kernels: :meth:`code`."""

    def __init__(self, folder: Path) -> None:
        self.stub = StubDriver(folder, self._launched, self._memory)
        self._events: list[Launched | Memory] = []

    @staticmethod
    def code(parameter_bytes: int) -> bytes:
        """In the place of a kernel's machine code."""
        return parameter_bytes.to_bytes(8, "little")

    def take(self) -> list[Launched | Memory]:
        """What happened since the last time."""
        events, self._events = self._events, []
        return events

    def _launched(self, pointer: Any, handle: int, parameters: int) -> int:
        config, attributes = pointer.contents, []
        for i in range(config.attribute_count):
            at = config.attributes + 72 * i
            attributes.append((ctypes.c_int.from_address(at).value, ctypes.c_int.from_address(at + 8).value))
        place = tuple(config.grid), tuple(config.block), config.shared, config.stream or 0
        self._events.append(Launched(*place, tuple(attributes), ctypes.string_at(parameters, handle or 0)))
        return 0

    def _memory(self, to: int | None, source: int | None, size: int) -> None:
        self._events.append(Memory(to or 0, source, size))

    def executor(self, name: str, first_number: int | None = None) -> Executor:
        """A new one, ``native`` or ``python``, that launches here. ``first_number``: that of its first launch."""
        if name == "native":
            native = self.stub.native_executor()
            if first_number is not None:
                folder = str(packaged_cubins.FOLDER).encode()
                assert native.library.kdacore_open(str(self.stub.path).encode(), folder, first_number) is None
            return native
        if first_number is not None:
            python_executor.NUMBERS = count(first_number)
        return PythonExecutor(self.stub.driver())
