"""Launches that begin while the launch ahead of them ends, with most parameters packed once."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from kdacore_cuda.build import KernelSource, load_or_compile
from kdacore_cuda.driver import driver
from kdacore_cuda.launch import Launcher
from kdacore_cuda.layout import ParamStruct

_CONFIG = struct.Struct(
    "<7I4xQQI4x"
)  # CUlaunchConfig: grid, block, shared memory, stream, attributes, their number
_STREAM = struct.Struct("<Q")
_STREAM_AT = 32
_ATTRIBUTE = struct.Struct("<i4xi60x")  # CUlaunchAttribute
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_FIRST_ARCH = 90
"""Compute capability from which a launch may begin early."""

_handles: dict[tuple[KernelSource, str], int] = {}


class EarlyLauncher(Launcher):
    """A kernel whose blocks wait by themselves for the launch ahead of theirs (``griddepcontrol.wait``).

    Where the architecture has that, the driver may place the blocks before the stream's last kernel has ended. What a
    call does not change is packed when the launcher is made.

    Args:
        kernel, params, threads, shared: as for :class:`Launcher`.
        fixed: the last of the struct's values; calls give those before them.
    """

    def __init__(
        self, kernel: KernelSource, params: ParamStruct, threads: int, shared: int, fixed: tuple[Any, ...]
    ) -> None:
        super().__init__(kernel, params, threads, shared)
        self.fixed = fixed
        given = len(params.fields) - len(fixed)
        self._pack = struct.Struct(params.packer.format[: given + 1]).pack_into
        params.packer.pack_into(self._buffer, 0, *([0] * given), *fixed)
        self._attribute = ctypes.create_string_buffer(_ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._config_at = ctypes.addressof(self._config)
        self._grid = -1

    def _prepare(self, device: int, arch: str) -> int:
        """The kernel's handle, shared by all launchers of it."""
        key = (self.kernel, arch)
        if key not in _handles:
            _handles[key] = driver().load_kernel(load_or_compile(self.kernel, arch), self.kernel.entry)
        handle = self._handles[device] = _handles[key]
        self._launch_ex = driver().launch_ex
        return handle

    def __call__(self, grid: int, device: int, arch: str, stream: int, values: tuple[Any, ...]) -> None:
        """As :meth:`Launcher.__call__`."""
        handle = self._handles.get(device)
        if handle is None:
            handle = self._prepare(device, arch)
        with self._lock:  # the driver has copied both buffers when launch returns
            if grid != self._grid:
                self._configure(grid, arch)
            self._pack(self._buffer, 0, *values)
            _STREAM.pack_into(self._config, _STREAM_AT, stream)
            code = self._launch_ex(self._config_at, handle, self._address, None)
        if code:
            driver().check("cuLaunchKernelEx", code)

    def _configure(self, grid: int, arch: str) -> None:
        early = int("".join(filter(str.isdigit, arch))) >= _FIRST_ARCH
        attributes = ctypes.addressof(self._attribute)
        _CONFIG.pack_into(
            self._config, 0, grid, 1, 1, self.threads, 1, 1, self.shared, 0, attributes, int(early)
        )
        self._grid = grid
