"""Registering with XLA the handler that makes our launches."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import jax.ffi

from kdacore_cuda.jax import python_handler
from kdacore_cuda.jax.xla_interface import Handler
from kdacore_cuda.runtime import driver, executor
from kdacore_cuda.runtime.native_executor import NativeExecutor
from kdacore_cuda.runtime.program import FORMAT

TARGET = f"kdacore_cuda.launch.{FORMAT}"
"""What XLA knows the handler by. The number is the format of the programs that it is given."""


def native_handler(native: NativeExecutor, entry: str = "kdacore_ffi_execute") -> Handler:
    """The handler in the library of the native executor."""
    return Handler(getattr(native.library, entry), native.add_kernel)


def load() -> Handler:
    """The handler of this process, by its executor.

    Raises OSError where there is no driver.
    """
    here = executor.executor()
    if isinstance(here, NativeExecutor):
        return native_handler(here)
    return python_handler.make_handler(here)


_lock = threading.Lock()
_registered: list[Handler] = []


def register() -> Handler:
    """The handler, registered with XLA at the first call.

    Raises OSError where there is no driver.
    """
    with _lock:
        if not _registered:
            handler = load()
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler.execute), platform="CUDA")
            _registered.append(handler)
    return _registered[0]


def add_kernels(cubins: Mapping[int, bytes]) -> None:
    """Make these cubins known to the handler, by id.

    Without a driver nothing can run here, and the call is being exported: the handler of the process
    that runs it takes them from its own package.
    """
    if driver.has_library():
        handler = register()
        for identity, cubin in cubins.items():
            handler.add_kernel(identity, cubin)
