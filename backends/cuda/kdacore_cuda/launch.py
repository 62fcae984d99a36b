"""A kernel ready to launch: loaded once per process, its parameters packed into one buffer."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from kdacore_cuda.build import KernelSource, load_or_compile
from kdacore_cuda.driver import NO_CONTEXT, driver
from kdacore_cuda.layout import ParamStruct

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel may have without asking."""


def _not_loaded(*args: Any) -> int:
    raise RuntimeError("the kernel has not been loaded")


class Launcher:
    """Launches one kernel with one parameter struct.

    Args:
        kernel: what to build.
        params: the struct its entry takes by value.
        threads: block size.
        shared: dynamic shared memory in bytes.
    """

    def __init__(self, kernel: KernelSource, params: ParamStruct, threads: int, shared: int) -> None:
        self.kernel, self.params, self.threads, self.shared = kernel, params, threads, shared
        self._launch: Callable[..., int] = _not_loaded
        self._handles: dict[int, int] = {}
        self._buffer = ctypes.create_string_buffer(params.size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._address = ctypes.addressof(self._pointers)
        self._pack = params.packer.pack_into
        self._lock = threading.Lock()

    def _prepare(self, device: int, arch: str) -> int:
        """Build (or find) the cubin for ``arch``, load it, and set its limits on ``device``."""
        chosen = driver()
        handle = chosen.load_kernel(load_or_compile(self.kernel, arch), self.kernel.entry)
        if self.shared > STATIC_SHARED:
            chosen.allow_shared(handle, self.shared, device)
        self._launch = chosen.launch
        self._handles[device] = handle
        return handle

    def __call__(self, grid: int, device: int, arch: str, stream: int, values: tuple[Any, ...]) -> None:
        """Pack ``values`` in the struct's order and launch on ``stream`` of ``device``. Never synchronises.

        Raises:
            BackendBuildError: the first call had to compile, and could not.
            DriverError: the driver refused the launch.
        """
        handle = self._handles.get(device)
        if handle is None:
            handle = self._prepare(device, arch)
        with self._lock:  # the driver has copied the buffer when launch returns
            self._pack(self._buffer, 0, *values)
            given = (handle, grid, 1, 1, self.threads, 1, 1, self.shared, stream, self._address, None)
            code = self._launch(*given)
            if code == NO_CONTEXT:
                driver().make_current(device)
                code = self._launch(*given)
        if code:
            driver().check("cuLaunchKernel", code)
