"""Launches with most parameters packed once: for calls seen before, where the host's time counts."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kdacore_cuda.driver import driver
from kdacore_cuda.launch import STREAM_AT, Launcher, put_stream

Start = Callable[[int, tuple[Any, ...]], None]
"""Launches on a stream with the values a call gives."""


class FixedLauncher:
    """A kernel most of whose parameters are the same in every call: packed when a launch of it is first asked for.

    Args:
        launcher: the kernel.
        given: names of the fields that calls give, 8 bytes each, in the struct's order.
        fixed: the other fields; those not named are 0, as all between two that calls give must be.
    """

    def __init__(self, launcher: Launcher, given: tuple[str, ...], fixed: Mapping[str, float]) -> None:
        self.launcher, self.given, self.fixed = launcher, given, dict(fixed)
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

    def all_values(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The whole struct's values for those of a call."""
        named = {**self.fixed, **dict(zip(self.given, values, strict=True))}
        return tuple(named.get(name, 0) for name, _ in self.launcher.params.fields)

    def _make_start(self, grid: int, device: int, arch: str) -> Start:
        chosen, loaded = driver(), self.launcher.load(device, arch, grid)
        handle, config, config_at, _ = loaded
        fixed = self.launcher.params.packer.pack(*self.all_values((0,) * len(self.given)))
        buffer = ctypes.create_string_buffer(fixed, len(fixed))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        pack, begin = self._packer(fixed)
        launch, lock, pointers_at = chosen.launch, threading.Lock(), ctypes.addressof(pointers)

        def start(stream: int, values: tuple[Any, ...]) -> None:
            with lock:  # the driver has copied both buffers when the call returns
                pack(buffer, begin, *values)
                put_stream(config, STREAM_AT, stream)
                code = launch(config_at, handle, pointers_at, None)
                if code:
                    chosen.recover(code, device, config_at, handle, pointers_at, None)

        start.kept = (pointers, loaded)  # type: ignore[attr-defined]  # the driver reads them at every launch
        return start

    def _packer(self, fixed: bytes) -> tuple[Callable[..., None], int]:
        """What packs a call's values, and where it begins. Fields between them are zeros, which padding writes."""
        places = [self.launcher.params.offsets[name] for name in self.given]
        text, at = "", places[0]
        for place in places:
            if place < at or any(fixed[at:place]):
                raise ValueError(
                    f"{self.launcher.kernel.name}: {self.given} are not in order, or not with zeros between"
                )
            text += f"{place - at}xq"
            at = place + 8
        return struct.Struct(text).pack_into, places[0]  # native sizes: standard ones convert twice
