"""Calls from JAX on the CPU: the real handlers, with a driver library whose launches a Python function makes."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import emulator
import jax.ffi
import jax.numpy as jnp
import numpy as np
import torch

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.build.packaged_executors import find_executor
from kdacore_cuda.jax import python_handler as ffi_callback
from kdacore_cuda.jax import xla_handler
from kdacore_cuda.jax.xla_interface import Handler
from kdacore_cuda.kernel_parameters import ParamStruct
from kdacore_cuda.runtime import driver, launch_program
from kdacore_cuda.runtime.driver import Driver

MULTIPROCESSORS = 132
_SOURCE = """
#include <string.h>
#include <stddef.h>
typedef int on_launch_t(const unsigned* config, void* kernel, void* parameters);
on_launch_t* on_launch;
int multiprocessors = 132, capability = 90, device, loads, limits, modes, cleared, refuses; void* current;
int cuCtxGetCurrent(void** c) { *c = current; return 0; }
int cuCtxGetDevice(int* d) { *d = device; return 0; }
int cuCtxPushCurrent_v2(void* c) { current = c; return 0; }
int cuCtxPopCurrent_v2(void** c) { *c = current; current = 0; return 0; }
int cuCtxSetCurrent(void* c) { current = c; return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) {
  *v = a == 16 ? multiprocessors : a == 75 ? capability / 10 : capability % 10; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) { return 1; }
int cuGetErrorName(int code, const char** text) { *text = "CUDA_ERROR_STUB"; return 0; }
int cuKernelSetAttribute(int what, int value, void* k, int d) { ++limits; return 0; }
int cuLibraryLoadData(void** l, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  ++loads; *l = *(void**)code; return 0; }
int cuLibraryGetKernel(void** k, void* l, const char* name) { *k = l; return 0; }
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t size, void* stream) {
  (void)stream;
  memcpy(to, from, size);
  return 0;
}
int cuMemsetD8Async(void* at, unsigned char value, size_t size, void* stream) {
  ++cleared; memset(at, value, size); return 0; }
int cuStreamGetCtx(void* s, void** c) { *c = (void*)0x100; return 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { ++modes; return 0; }
int cuLaunchKernelEx(const unsigned* config, void* f, void** arguments, void** extra) {
  return refuses ? refuses : on_launch(config, f, arguments[0]); }
"""
_OnLaunch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p, ctypes.c_void_p)


class Launched(NamedTuple):
    """A launch as the driver got it."""

    kernel: KernelSource
    values: tuple[Any, ...]
    grid: int
    threads: int
    shared: int
    overlaps: bool


class Device:
    """The driver library, and what is launched through it."""

    def __init__(self, folder: Path) -> None:
        assert shutil.which("gcc"), "the CUDA backend's tests need gcc and g++"
        (folder / "stub.c").write_text(_SOURCE)
        self.path = folder / "libcuda.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", folder / "stub.c", "-o", self.path], check=True)
        self.library = ctypes.CDLL(str(self.path))
        self.launched: list[Launched] = []
        self.run: Callable[[Launched], None] = lambda launched: None
        """What a launch does."""
        self.failed: list[BaseException] = []
        self.raw: list[int] = []
        """Handles that are none of :meth:`cubin`: the first 8 bytes of what was loaded."""
        self._kernels: list[KernelSource] = []
        self._params: dict[KernelSource, ParamStruct] = {}
        # XLA's threads take denormal numbers for zero.
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(int).result()
        self._callback = _OnLaunch(self._on_launch)
        ctypes.c_void_p.in_dll(self.library, "on_launch").value = ctypes.cast(
            self._callback, ctypes.c_void_p
        ).value

    def reset(self) -> None:
        """Forget what was launched; launches do nothing."""
        self.launched.clear()
        self.failed.clear()
        self.run = lambda launched: None
        for name, value in (
            ("multiprocessors", MULTIPROCESSORS),
            ("capability", 90),
            ("refuses", 0),
            ("device", 0),
        ):
            self.number(name).value = value

    def number(self, name: str) -> ctypes.c_int:
        """A variable of the driver library."""
        return ctypes.c_int.in_dll(self.library, name)

    def cubin(self, kernel: KernelSource, arch: str) -> tuple[int, bytes]:
        """In the place of machine code: bytes that the driver library takes for it."""
        if kernel not in self._kernels:
            self._kernels.append(kernel)
        code = (self._kernels.index(kernel) + 1).to_bytes(8, "little") + kernel.name.encode()
        return int.from_bytes(hashlib.sha256(code).digest()[:8], "big"), code

    def note(self, step: Any) -> None:
        """Remember how the parameters of a launch are packed."""
        self._params[step.launcher.kernel] = step.launcher.params

    def _on_launch(self, config: Any, handle: int, parameters: int) -> int:
        if not 0 < handle <= len(self._kernels):
            self.raw.append(handle)
            return 0
        kernel = self._kernels[handle - 1]
        params = self._params[kernel]
        values = params.packer.unpack(ctypes.string_at(parameters, params.size))
        launched = Launched(kernel, values, config[0], config[3], config[6], bool(config[12]))
        self.launched.append(launched)
        try:
            self.run(launched)
        except BaseException as error:  # noqa: BLE001  # a C caller has no use for it
            self.failed.append(error)
            return 999
        return 0

    def emulate(self, launched: Launched) -> None:
        """Run a launch in the emulator."""
        self._thread.submit(self._emulate, launched).result()

    def _emulate(self, launched: Launched) -> None:
        emulator.run(
            *(launched.kernel, self._params[launched.kernel], launched.values),
            grid=launched.grid,
            threads=launched.threads,
            shared=launched.shared,
            cluster=dict(launched.kernel.defines).get("CLUSTER", 1),
        )


def install(monkeypatch: Any, device: Device, handler: Handler, target: str) -> None:
    """Calls from JAX on the CPU go to ``device`` through ``handler``, which is registered as ``target``."""
    from kdacore_cuda.jax import devices as jax_devices

    pack = launch_program._kernel_words

    def noted(step: Any, *rest: Any) -> Any:
        device.note(step)
        return pack(step, *rest)

    monkeypatch.setattr(launch_program, "_cubin", device.cubin)
    monkeypatch.setattr(launch_program, "_kernel_words", noted)
    monkeypatch.setattr(jax_devices, "multiprocessors", lambda index: MULTIPROCESSORS)
    monkeypatch.setattr(xla_handler, "TARGET", target)
    monkeypatch.setattr(xla_handler, "register", lambda: handler)
    monkeypatch.setattr(driver, "has_library", lambda: True)


def native_handler(device: Device) -> Handler:
    """The packaged handler, for XLA's CPU device."""
    found = find_executor()
    assert isinstance(found, Path), found
    handler = xla_handler.load_native(found, str(device.path), "kdacore_ffi_execute_without_stream")
    assert isinstance(handler, Handler), handler
    return handler


def python_handler(device: Device) -> Handler:
    """The handler in Python, for XLA's CPU device."""
    return ffi_callback.make_handler(Driver(str(device.path)), has_stream=False)


def register(handler: Handler, target: str) -> None:
    """Make a handler known to XLA, once in a process."""
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.execute), platform="cpu")


def to_jax(x: torch.Tensor | None) -> Any:
    """A JAX array with the same bits."""
    if x is None:
        return None
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.contiguous().view(torch.int16).numpy()).view(jnp.bfloat16)
    return jnp.asarray(x.numpy())


def to_torch(x: Any) -> torch.Tensor:
    """A torch tensor with the same bits."""
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))
