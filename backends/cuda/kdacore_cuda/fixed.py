"""Launches with most parameters packed once; some begin while the launch ahead of them ends."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

from kdacore_cuda.build import KernelSource, load_or_compile
from kdacore_cuda.driver import NO_CONTEXT, driver
from kdacore_cuda.launch import STATIC_SHARED, Launcher
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

Start = Callable[[int, tuple[Any, ...]], None]
"""Launches on a stream with the values a call gives."""


class FixedLauncher(Launcher):
    """A kernel most of whose parameters are the same in every call: packed when the launcher is made.

    Args:
        kernel, params, threads, shared: as for :class:`Launcher`.
        fixed: the last of the struct's values; calls give those before them, 8 bytes each.
        early: the kernel's blocks wait by themselves for the launch ahead of theirs (``griddepcontrol.wait``). Where
            the architecture has that, the driver may place them before the stream's last kernel has ended.
    """

    def __init__(
        self,
        kernel: KernelSource,
        params: ParamStruct,
        threads: int,
        shared: int,
        fixed: tuple[Any, ...],
        early: bool = False,
    ) -> None:
        super().__init__(kernel, params, threads, shared)
        self.fixed, self.early = fixed, early
        self._starts: dict[tuple[int, int, str], Start] = {}

    def __call__(self, grid: int, device: int, arch: str, stream: int, values: tuple[Any, ...]) -> None:
        """As :meth:`Launcher.__call__`."""
        self.start_of(grid, device, arch)(stream, values)

    def start_of(self, grid: int, device: int, arch: str) -> Start:
        """The launch of ``grid`` blocks on ``device`` (of ``arch``) when it is current, nothing left to look up."""
        start = self._starts.get((grid, device, arch))
        if start is None:
            start = self._starts[grid, device, arch] = self._make_start(grid, device, arch)
        return start

    def _make_start(self, grid: int, device: int, arch: str) -> Start:
        chosen, handle = driver(), self._handle(arch)
        if self.shared > STATIC_SHARED:
            chosen.allow_shared(handle, self.shared, device)
        given = len(self.params.fields) - len(self.fixed)
        buffer = ctypes.create_string_buffer(self.params.packer.pack(*([0] * given), *self.fixed))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        attribute = ctypes.create_string_buffer(_ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
        early = self.early and int("".join(filter(str.isdigit, arch))) >= _FIRST_ARCH
        blocks = (grid, 1, 1, self.threads, 1, 1, self.shared)
        config = ctypes.create_string_buffer(
            _CONFIG.pack(*blocks, 0, ctypes.addressof(attribute), int(early))
        )
        pack = struct.Struct(f"{given}n").pack_into  # a call gives 8-byte fields; "Q" takes twice as long
        put_stream, launch, lock = _STREAM.pack_into, chosen.launch_ex, threading.Lock()
        config_at, pointers_at = ctypes.addressof(config), ctypes.addressof(pointers)
        kept = (pointers, attribute)

        def start(stream: int, values: tuple[Any, ...]) -> None:
            with lock:  # the driver has copied both buffers when the call returns
                pack(buffer, 0, *values)
                put_stream(config, _STREAM_AT, stream)
                code = launch(config_at, handle, pointers_at, None)
                if code == NO_CONTEXT:
                    chosen.make_current(device)
                    code = launch(config_at, handle, pointers_at, None)
            if code:
                chosen.check("cuLaunchKernelEx", code)

        start.kept = kept  # type: ignore[attr-defined]  # the driver reads them at every launch
        return start

    def _handle(self, arch: str) -> int:
        """The kernel's handle, shared by all launchers of it."""
        key = (self.kernel, arch)
        if key not in _handles:
            _handles[key] = driver().load_kernel(load_or_compile(self.kernel, arch), self.kernel.entry)
        return _handles[key]
