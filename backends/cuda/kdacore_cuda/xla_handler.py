"""Registering with XLA the handler that makes our launches: the packaged native one, else one in
Python."""

from __future__ import annotations

import ctypes
import re
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax.ffi

from kdacore.errors import PerformanceWarning
from kdacore_cuda import driver, packaged_cubins, packaged_handlers

TARGET = "kdacore_cuda.launch.1"
"""What XLA knows the handler by. The number is the format of the programs that it is given."""
API_VERSIONS = ((0, 3), (0, 4))
"""Versions of XLA's interface to handlers (xla/ffi/api/c_api.h) that the handler was read against:
those of jaxlib 0.10 to 0.11."""
_VERSION = re.compile(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)")


class Handler(NamedTuple):
    """A handler in this process."""

    execute: object
    """Its address, as ``jax.ffi.pycapsule`` takes it."""
    add_kernel: Callable[[int, bytes], None]
    """Makes the cubin with that id known to it."""


@cache
def api_version() -> tuple[int, int] | None:
    """The version of XLA's interface that this jaxlib has, as its header says; None if it does not."""
    try:
        header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    except OSError:
        return None
    found = {name: int(number) for name, number in _VERSION.findall(header)}
    return (found["MAJOR"], found["MINOR"]) if len(found) == 2 else None


def problem() -> tuple[str, str] | None:
    """Why no handler can be registered with this jaxlib: what it has, what is wanted."""
    found = api_version()
    if found in API_VERSIONS:
        return None
    wanted = "XLA FFI " + " or ".join(f"{major}.{minor}" for major, minor in API_VERSIONS)
    return (f"XLA FFI {found[0]}.{found[1]}" if found else "a jaxlib without its FFI headers"), wanted


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
    from kdacore_cuda import ffi_callback

    warnings.warn(
        f"kdacore's native XLA handler does not load ({native}); calls from JAX are launched by Python, "
        "tens of microseconds each and milliseconds beside a busy Python thread",
        PerformanceWarning,
        stacklevel=2,
    )
    return ffi_callback.make_handler(driver.driver())


_lock = threading.Lock()
_registered: list[Handler] = []


def register(platform: str = "CUDA") -> Handler:
    """The handler, registered with XLA at the first call.

    Programs that were exported with :mod:`jax.export` need this before they run, where no call of
    kdacore has been made: the public way to it is any call with arrays on the GPU.
    """
    with _lock:
        if not _registered:
            handler = load()
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler.execute), platform=platform)
            _registered.append(handler)
    return _registered[0]


def add_kernels(cubins: Mapping[int, bytes]) -> None:
    """Make these cubins known to the handler, by id."""
    handler = register()
    for identity, cubin in cubins.items():
        handler.add_kernel(identity, cubin)
