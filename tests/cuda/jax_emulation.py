"""Calls from JAX on the CPU: the real handlers, with a driver library whose launches a Python function makes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import emulator
import jax.ffi
import jax.numpy as jnp
import numpy as np
import torch
from stub_driver import StubDriver

from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.jax import python_handler as ffi_callback
from kdacore_cuda.jax import xla_handler
from kdacore_cuda.kernel_parameters import ParamStruct
from kdacore_cuda.runtime import program as programs
from kdacore_cuda.runtime.executor import Executor
from kdacore_cuda.runtime.program import Launch, Program
from kdacore_cuda.runtime.python_executor import PythonExecutor

MULTIPROCESSORS = 132


class Handler(NamedTuple):
    """A handler for XLA's CPU device, and the executor that it launches by."""

    execute: object
    executor: Executor


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
        self.stub = StubDriver(folder, self._on_launch)
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

    def reset(self) -> None:
        """Forget what was launched; launches do nothing."""
        self.launched.clear()
        self.failed.clear()
        self.run = lambda launched: None
        self.stub.reset()

    def number(self, name: str) -> ctypes.c_int:
        """A variable of the driver library."""
        return self.stub.number(name)

    def cubin(self, kernel: KernelSource, arch: str) -> tuple[int, bytes]:
        """In the place of machine code: bytes that the driver library takes for it."""
        if kernel not in self._kernels:
            self._kernels.append(kernel)
        code = (self._kernels.index(kernel) + 1).to_bytes(8, "little") + kernel.name.encode()
        return int.from_bytes(hashlib.sha256(code).digest()[:8], "big"), code

    def note(self, step: Launch) -> None:
        """Remember how the parameters of a launch are packed."""
        self._params[step.kernel.source] = step.kernel.params

    def _on_launch(self, pointer: Any, handle: int, parameters: int) -> int:
        if not 0 < handle <= len(self._kernels):
            self.raw.append(handle)
            return 0
        kernel = self._kernels[handle - 1]
        params = self._params[kernel]
        values = params.packer.unpack(ctypes.string_at(parameters, params.size))
        config = pointer.contents
        shape = config.grid[0], config.block[0], config.shared
        launched = Launched(kernel, values, *shape, bool(config.attribute_count))
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

    pack = Program._kernel_words

    def noted(program: Program, step: Launch, *rest: Any) -> Any:
        device.note(step)
        return pack(program, step, *rest)

    monkeypatch.setattr(programs, "cubin_of", device.cubin)
    monkeypatch.setattr(Program, "_kernel_words", noted)
    monkeypatch.setattr(jax_devices, "multiprocessors", lambda index: MULTIPROCESSORS)
    monkeypatch.setattr(xla_handler, "TARGET", target)
    monkeypatch.setattr(xla_handler, "register", lambda: handler.executor)
    monkeypatch.setattr(xla_handler, "_driver_missing", lambda: None)


def native_handler(device: Device) -> Handler:
    """The handler in the packaged executor."""
    native = device.stub.native_executor()
    return Handler(native.library.kdacore_ffi_execute_without_stream, native)


def python_handler(device: Device) -> Handler:
    """The handler in Python."""
    python = PythonExecutor(device.stub.driver())
    return Handler(ffi_callback.make_handler(python, has_stream=False), python)


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
