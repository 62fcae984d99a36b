"""Launching a kernel: it is loaded once per process, and its parameters are packed into one
buffer."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any, NamedTuple

from kdacore_cuda.build.cubin_lookup import load_or_compile
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.kernel_parameters import ParamStruct
from kdacore_cuda.runtime.driver import driver

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory a kernel may use without raising its limit."""

_CONFIG = struct.Struct("<7I4xQQI4x")
"""CUlaunchConfig: grid, block, shared memory, stream, attributes, their number."""
_ATTRIBUTE = struct.Struct("<i4xi60x")
"""CUlaunchAttribute."""
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_OVERLAP_ARCH = 90
"""Compute capability (times 10) from which a launch may start before the previous one has ended."""
put_grid, put_stream = struct.Struct("<I").pack_into, struct.Struct("<Q").pack_into
STREAM_OFFSET = 32
"""Byte offset of the stream in a CUlaunchConfig."""

_handles: dict[tuple[KernelSource, str], int] = {}


def overlaps_launches(arch: str) -> bool:
    """Whether a launch may start before the previous one has ended on this real architecture."""
    return int("".join(filter(str.isdigit, arch))) >= _OVERLAP_ARCH


def launch_attribute() -> ctypes.Array[ctypes.c_char]:
    """The attribute of launches that may start before the previous one has ended."""
    return ctypes.create_string_buffer(_ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))


def launch_config(
    grid: int,
    threads: int,
    shared: int,
    stream: int,
    attribute: ctypes.Array[ctypes.c_char],
    overlaps: bool,
) -> ctypes.Array[ctypes.c_char]:
    """A CUlaunchConfig, which points to ``attribute`` and counts it if the launch ``overlaps``."""
    blocks = (grid, 1, 1, threads, 1, 1, shared)
    return ctypes.create_string_buffer(
        _CONFIG.pack(*blocks, stream, ctypes.addressof(attribute), int(overlaps))
    )


class Loaded(NamedTuple):
    """A kernel on one device, and the configuration of its launches."""

    handle: int
    config: ctypes.Array[ctypes.c_char]
    config_address: int
    attribute: ctypes.Array[ctypes.c_char]
    """The configuration points to it; the driver reads it at every launch."""


class Launcher:
    """Launches one kernel with one parameter struct.

    Every kernel waits for the previous launch by itself (``wait_for_inputs`` of
    csrc/common/ptx.cuh). So, from compute capability 9.0, the driver may place its blocks before
    the stream's previous kernel has ended.

    Args:
        kernel: what to build.
        params: the struct its entry takes by value.
        threads: block size.
        shared: dynamic shared memory in bytes.
    """

    def __init__(self, kernel: KernelSource, params: ParamStruct, threads: int, shared: int) -> None:
        self.kernel, self.params, self.threads, self.shared = kernel, params, threads, shared
        self._loaded: dict[tuple[int, str], Loaded] = {}
        self._buffer = ctypes.create_string_buffer(params.size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._address = ctypes.addressof(self._pointers)
        self._pack = params.packer.pack_into
        self._lock = threading.Lock()

    def load(self, device: int, arch: str, grid: int = 0) -> Loaded:
        """Find or compile the cubin for ``arch``, load it, and set its limits on ``device``.

        Raises:
            BackendBuildError: it had to be compiled, and could not be.
            DriverError: the driver refused it.
        """
        chosen, key = driver(), (self.kernel, arch)
        handle = _handles.get(key)
        if handle is None:
            cubin = load_or_compile(self.kernel, arch)
            handle = _handles[key] = chosen.load_kernel(cubin, self.kernel.entry)
        if self.shared > STATIC_SHARED:
            chosen.allow_shared(handle, self.shared, device)
        overlaps = overlaps_launches(arch)
        attribute = launch_attribute()
        config = launch_config(grid, self.threads, self.shared, 0, attribute, overlaps)
        return Loaded(handle, config, ctypes.addressof(config), attribute)

    def clusters_at_once(self, device: int, arch: str) -> int:
        """How many of the kernel's clusters run at once on ``device``, as the driver says
        (:meth:`kdacore_cuda.runtime.driver.Driver.clusters_at_once`). The kernel is loaded.

        Raises BackendBuildError or DriverError.
        """
        loaded = self.load(device, arch, dict(self.kernel.defines)["CLUSTER"])
        return driver().clusters_at_once(loaded.handle, loaded.config_address, device)

    def __call__(self, grid: int, device: int, arch: str, stream: int, values: tuple[Any, ...]) -> None:
        """Pack ``values`` in the struct's order and launch on ``stream`` of ``device``. Never
        synchronises.

        Raises:
            BackendBuildError: the first call had to compile the kernel, and could not.
            DriverError: the driver refused the kernel or the launch.
        """
        loaded = self._loaded.get((device, arch))
        if loaded is None:
            loaded = self._loaded[device, arch] = self.load(device, arch)
        chosen = driver()
        with self._lock:  # the driver has copied both buffers when launch returns
            self._pack(self._buffer, 0, *values)
            put_grid(loaded.config, 0, grid)
            put_stream(loaded.config, STREAM_OFFSET, stream)
            arguments = (loaded.config_address, loaded.handle, self._address, None)
            code = chosen.launch(*arguments)
            if code:
                chosen.recover(code, device, *arguments)
