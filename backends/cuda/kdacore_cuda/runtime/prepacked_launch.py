"""Launches with most parameters packed in advance: for cached calls, where the host's time
counts."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple

from kdacore_cuda.runtime.driver import Driver, driver
from kdacore_cuda.runtime.launcher import STREAM_OFFSET, Launcher, Loaded, put_stream

Start = Callable[[int, tuple[Any, ...]], None]
"""``start(stream, values)`` launches on a stream, with the values that change from call to call."""


@cache
def _packing(text: str) -> Callable[..., None]:
    """What packs values in this format. Native sizes: standard ones convert twice."""
    return struct.Struct(text).pack_into


class Prepacked(NamedTuple):
    """Everything that a launch hands to the driver, in memory that stays where it is."""

    driver: Driver
    loaded: Loaded
    buffer: ctypes.Array[ctypes.c_char]
    """The parameters. Those of a call are written at ``offset`` by ``pack(buffer, offset, *values)``."""
    offset: int
    pack: Callable[..., None]
    pointers: ctypes.Array[ctypes.c_void_p]
    """To the buffer; the driver reads it at every launch."""


class PrepackedLauncher:
    """A kernel most of whose parameters are the same in every call. They are packed in advance.

    Args:
        launcher: the kernel.
        per_call: names of the fields that calls give, 8 bytes each, in the struct's order.
        fixed: values of other fields by name. Fields not named are 0; all fields between two of
            ``per_call`` must be.
    """

    def __init__(self, launcher: Launcher, per_call: tuple[str, ...], fixed: Mapping[str, float]) -> None:
        self.launcher, self.per_call, self.fixed = launcher, per_call, dict(fixed)

    def all_values(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of the whole struct, given those of a call."""
        named = {**self.fixed, **dict(zip(self.per_call, values, strict=True))}
        return tuple(named.get(name, 0) for name, _ in self.launcher.params.fields)

    def prepare(self, grid: int, device: int, arch: str) -> Prepacked:
        """The launch of ``grid`` blocks with the parameters that stay in place.

        Raises as :meth:`start_for`.
        """
        loaded = self.launcher.load(device, arch, grid)
        params = self.launcher.params
        packed = params.packer.pack(*map(self.fixed.get, params.offsets, repeat(0)))
        buffer = ctypes.create_string_buffer(packed, len(packed))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        pack, offset = self._packer(packed)
        return Prepacked(driver(), loaded, buffer, offset, pack, pointers)

    def start_for(self, grid: int, device: int, arch: str) -> Start:
        """The launch of ``grid`` blocks on ``device`` (of ``arch``), with nothing left to look up.

        ``device`` must be current when this is called and when the launch is.

        Raises:
            BackendBuildError, DriverError: as :meth:`kdacore_cuda.runtime.launcher.Launcher.__call__`; the launch
                raises DriverError.
            ValueError: ``per_call`` is not in the struct's order, or a field between two of them is
                not 0.
        """
        prepared = self.prepare(grid, device, arch)
        chosen, (handle, config, config_address, _), buffer, offset, pack, pointers = prepared
        launch, lock, pointers_address = chosen.launch, threading.Lock(), ctypes.addressof(pointers)

        def start(stream: int, values: tuple[Any, ...]) -> None:
            with lock:  # the driver has copied both buffers when the call returns
                pack(buffer, offset, *values)
                put_stream(config, STREAM_OFFSET, stream)
                code = launch(config_address, handle, pointers_address, None)
                if code:
                    chosen.recover(code, device, config_address, handle, pointers_address, None)

        start.kept = prepared  # type: ignore[attr-defined]  # the driver reads it at every launch
        return start

    def _packer(self, packed: bytes) -> tuple[Callable[..., None], int]:
        """What packs a call's values, and the offset where it starts. It writes zeros to the fields
        between them."""
        offsets = [self.launcher.params.offsets[name] for name in self.per_call]
        text, end = "", offsets[0]
        for offset in offsets:
            if offset < end or any(packed[end:offset]):
                raise ValueError(
                    f"{self.launcher.kernel.name}: {self.per_call} are not in order, or not with zeros between"
                )
            text += f"{offset - end}xq"
            end = offset + 8
        return _packing(text), offsets[0]
