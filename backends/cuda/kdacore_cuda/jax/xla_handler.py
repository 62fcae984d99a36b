"""Registering with XLA the handler that makes our launches: the packaged native one, else one in
Python."""

from __future__ import annotations

import ctypes
import secrets
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax.ffi

from kdacore.errors import PerformanceWarning
from kdacore_cuda.build import packaged_cubins, packaged_handlers
from kdacore_cuda.jax import python_handler as ffi_callback
from kdacore_cuda.jax.xla_interface import Handler
from kdacore_cuda.runtime import driver

TARGET = "kdacore_cuda.launch.1"
"""What XLA knows the handler by. The number is the format of the programs that it is given."""


def load_native(
    path: Path, library: str = driver.LIBRARY, entry: str = "kdacore_ffi_execute"
) -> Handler | str:
    """The handler in the library ``path``, launching through the driver ``library``; or why it does
    not load."""
    try:
        native = ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    native.kdacore_ffi_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64]
    native.kdacore_ffi_open.restype = ctypes.c_char_p
    native.kdacore_ffi_add_kernel.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
    wrong = native.kdacore_ffi_open(
        library.encode(), str(packaged_cubins.FOLDER).encode(), secrets.randbits(62)
    )
    if wrong:
        return str(wrong.decode())

    def add_kernel(identity: int, cubin: bytes) -> None:
        if native.kdacore_ffi_add_kernel(identity, cubin, len(cubin)):
            raise MemoryError("no room for another kernel in the XLA handler")

    return Handler(getattr(native, entry), add_kernel)


def load() -> Handler:
    """The handler of this process. Warns where it is not the native one.

    Raises OSError where there is no driver.
    """
    found = packaged_handlers.find_handler()
    native = found if isinstance(found, str) else load_native(found)
    if isinstance(native, Handler):
        return native
    warnings.warn(
        f"kdacore's native XLA handler does not load ({native}); calls from JAX are launched by Python, "
        "tens of microseconds each and milliseconds beside a busy Python thread",
        PerformanceWarning,
        stacklevel=2,
    )
    return ffi_callback.make_handler(driver.driver())


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
