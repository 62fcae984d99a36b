"""Several launches that a cached call makes one after the other, with nothing to look up between
them.

Their parameters are packed in advance as in :mod:`kdacore_cuda.runtime.prepacked_launch`, and one function
written for the sequence makes all of them: of a training step with five launches, calls and loops
of Python would otherwise be half of the host's time.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from kdacore_cuda.runtime.launch_order import OTHER_WORK, check_order
from kdacore_cuda.runtime.launcher import STREAM_OFFSET, Launcher, put_stream
from kdacore_cuda.runtime.prepacked_launch import PrepackedLauncher

StartAll = Callable[..., None]
"""``start(stream, *addresses)`` makes all launches of a sequence on a stream."""


class PlannedLaunch(NamedTuple):
    """One launch of a sequence, described by what its parameters hold."""

    name: str
    launcher: Launcher
    grid: int
    """Blocks. A launch of 0 blocks is left out."""
    arrays: Mapping[str, tuple[str, int]]
    """Field of the parameters to the name of an array and an offset in it, in bytes."""
    fixed: Mapping[str, float]
    """Field to a number that is the same in every call. Fields named nowhere are 0."""


def check_launches(steps: Sequence[Any]) -> None:
    """Raise ValueError unless the launches among a program's steps come in an order in which each may begin before the
    one ahead has ended (:mod:`kdacore_cuda.runtime.launch_order`)."""
    launches = [x for x in steps if isinstance(x, PlannedLaunch)]
    entries = [
        x.launcher.kernel.entry if isinstance(x, PlannedLaunch) else OTHER_WORK
        for x in steps
        if not isinstance(x, PlannedLaunch) or x.grid
    ]
    check_order(entries, one_segment=all(x.fixed.get("segments", 0) < 2 for x in launches))


class LaunchSequence:
    """Launches in the order in which they are made. One that takes the parameters of the one before
    it shares them.

    Args:
        launches: what they are.
        names: the arrays whose addresses a call gives, in that order; 0 for an absent array.

    Raises ValueError where a launch takes an array that is not among ``names``, or may not follow the one ahead.
    """

    def __init__(self, launches: Sequence[PlannedLaunch], names: tuple[str, ...]) -> None:
        self.launches = tuple(x for x in launches if x.grid)
        check_launches(self.launches)
        self.names = names
        self.starts: dict[int, StartAll] = {}
        """By device: what :meth:`start_for` made for calls that are not cached."""
        missing = {name for x in self.launches for name, _ in x.arrays.values()} - set(names)
        if missing:
            raise ValueError(f"arrays that no call gives: {', '.join(sorted(missing))}")
        self.launchers = tuple(
            PrepackedLauncher(x.launcher, _in_order(x), dict(x.fixed)) for x in self.launches
        )

    def values(self, launch: int, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """Values of the whole struct of one launch, given the addresses of a call."""
        places, launcher = self.launches[launch].arrays, self.launchers[launch]
        at = dict(zip(self.names, addresses, strict=True))
        per_call = tuple(at[name] + offset for name, offset in map(places.__getitem__, launcher.per_call))
        return launcher.all_values(per_call)

    def start_for(self, device: int, arch: str) -> StartAll:
        """The function that makes the launches on ``device`` (of ``arch``).

        ``device`` must be current when this is called and when the function is. Kernels are loaded
        here. Raises BackendBuildError or DriverError; the function raises DriverError.
        """
        if len(self.launches) == 1 and not any(offset for _, offset in self.launches[0].arrays.values()):
            return self._start_of_one(device, arch)
        lines: list[str] = []
        kept: list[Any] = []
        configs: list[Any] = []
        used: dict[str, Any] = {"lock": threading.Lock(), "device": device, "there": None}
        for i, (planned, launcher) in enumerate(zip(self.launches, self.launchers, strict=True)):
            chosen, loaded, buffer, offset, pack, pointers = launcher.prepare(planned.grid, device, arch)
            used |= {"launch": chosen.launch, "recover": chosen.recover}
            if not i or not _same_parameters(planned, self.launches[i - 1]):
                address = ctypes.addressof(pointers)
                given = [_sum(*planned.arrays[field]) for field in launcher.per_call]
                used |= {f"pack{i}": pack, f"buffer{i}": buffer}
                kept += [buffer, pointers]
                lines.append(f"        pack{i}(buffer{i}, {offset}, {', '.join(given)})")
            arguments = f"{loaded.config_address}, {loaded.handle}, {address}, None"
            lines += [
                f"        code = launch({arguments})",
                f"        if code: recover(code, device, {arguments})",
            ]
            kept.append(loaded)
            configs.append(loaded.config)

        def put_streams(stream: int) -> None:
            for config in configs:
                put_stream(config, STREAM_OFFSET, stream)

        used["put_streams"] = put_streams
        source = [
            f"def start({', '.join(('stream', *map(_argument, self.names)))}):",
            "    global there",
            "    with lock:",  # the driver has copied the buffers when a call of it returns
            "        if stream != there:",
            "            put_streams(stream)",
            "            there = stream",
            *lines,
        ]
        exec("\n".join(source), used)
        start: StartAll = used["start"]
        start.kept = kept  # type: ignore[attr-defined]  # the driver reads it at every launch
        return start

    def _start_of_one(self, device: int, arch: str) -> StartAll:
        """The same of one launch whose arrays all begin at the addresses given: nothing has to be written for it."""
        (planned,), (launcher,) = self.launches, self.launchers
        prepared = launcher.prepare(planned.grid, device, arch)
        chosen, (handle, config, config_address, _), buffer, offset, pack, pointers = prepared
        launch, lock, pointers_address = chosen.launch, threading.Lock(), ctypes.addressof(pointers)
        names = tuple(planned.arrays[field][0] for field in launcher.per_call)
        take = None if names == self.names else _taking(names, self.names)

        def start(stream: int, *addresses: int) -> None:
            with lock:  # the driver has copied both buffers when the call returns
                pack(buffer, offset, *(addresses if take is None else take(addresses)))
                put_stream(config, STREAM_OFFSET, stream)
                code = launch(config_address, handle, pointers_address, None)
                if code:
                    chosen.recover(code, device, config_address, handle, pointers_address, None)

        start.kept = prepared  # type: ignore[attr-defined]  # the driver reads it at every launch
        return start


def _taking(names: tuple[str, ...], given: tuple[str, ...]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """What takes the addresses of some arrays out of those that a call gives."""
    places = [given.index(name) for name in names]
    return itemgetter(*places) if len(places) > 1 else lambda addresses: (addresses[places[0]],)


def _in_order(launch: PlannedLaunch) -> tuple[str, ...]:
    """The fields that a call gives, in the struct's order."""
    fields = tuple(name for name, _ in launch.launcher.params.fields if name in launch.arrays)
    unknown = launch.arrays.keys() - set(fields)
    if unknown:
        raise ValueError(f"{launch.name}: no such fields: {', '.join(sorted(unknown))}")
    return fields


def _same_parameters(a: PlannedLaunch, b: PlannedLaunch) -> bool:
    return (a.launcher.params, a.arrays, a.fixed) == (b.launcher.params, b.arrays, b.fixed)


def _argument(name: str) -> str:
    """An array's name in the function written: no other name begins like it."""
    return f"at_{name}"


def _sum(name: str, offset: int) -> str:
    return f"{_argument(name)} + {offset}" if offset else _argument(name)
