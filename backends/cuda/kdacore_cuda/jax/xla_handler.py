"""Registering with XLA the handler that makes our launches."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import jax.ffi

from kdacore_cuda import _driver_missing
from kdacore_cuda.jax import python_handler
from kdacore_cuda.runtime import executor
from kdacore_cuda.runtime.executor import Executor
from kdacore_cuda.runtime.native_executor import NativeExecutor
from kdacore_cuda.runtime.program import FORMAT

TARGET = f"kdacore_cuda.launch.{FORMAT}"
"""What XLA knows the handler by. The number is the format of the programs that it is given."""


_lock = threading.Lock()
_registered: list[object] = []
"""XLA holds no reference to the handler."""


def register() -> Executor:
    """The executor of this process, whose handler is registered with XLA at the first call.

    Raises OSError where there is no driver.
    """
    with _lock:
        here = executor.executor()
        if not _registered:
            handler: object = (
                here.library.kdacore_ffi_execute  # that of the native executor is in its library
                if isinstance(here, NativeExecutor)
                else python_handler.make_handler(here)
            )
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="CUDA")
            _registered.append(handler)
    return here


def add_kernels(cubins: Mapping[int, bytes]) -> None:
    """Make these cubins known to the executor, by id.

    Without a driver nothing can run here, and the call is being exported: the executor of the process
    that runs it takes them from its own package.
    """
    if _driver_missing() is None:
        here = register()
        for identity, cubin in cubins.items():
            here.add_kernel(identity, cubin)
