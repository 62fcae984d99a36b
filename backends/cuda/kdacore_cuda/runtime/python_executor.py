"""The executor in Python, for machines that the native one (csrc/executor) does not load on. It writes the same bytes
to the driver."""

from __future__ import annotations

import secrets
import struct
import threading
from collections.abc import Iterator
from itertools import count

import numpy as np

from kdacore_cuda.build.packaged_cubins import FOLDER
from kdacore_cuda.runtime import program as programs
from kdacore_cuda.runtime.driver import Driver

NUMBERS = count(secrets.randbits(62))
"""A different number for every call, which uninitialised memory does not hold by chance. Flags in device memory count
as raised when they hold it."""
_ARGUMENTS, _NUMBERS, _OWN, _STEPS = slice(3, 6), 5, 6, 7
"""Places in the header."""
_MOST_BLOCKS = 2**31 - 1
STATIC_SHARED = 48 * 1024
"""Bytes of shared memory a kernel may use without raising its limit."""


class ProgramError(ValueError):
    """A program that cannot be run: it is damaged, or was made by another version."""


class DeviceMismatchError(RuntimeError):
    """A program was made for another device than the current one."""


def damaged(what: str) -> ProgramError:
    """The error of a program of which ``what`` is wrong."""
    return ProgramError(f"the call was compiled by another version of kdacore, or is damaged: {what}")


def too_many(what: str) -> ProgramError:
    """The error of a step with such a size."""
    return ProgramError(f"{what}: the call is damaged, or too large")


def steps_of(words: list[int]) -> Iterator[list[int]]:
    """The steps of a program, one after another. Raises ProgramError where one is cut off."""
    at = programs.HEADER_WORDS + words[_OWN]
    for _ in range(words[_STEPS]):
        length = words[at + 1] if at + 2 <= len(words) else -1
        if not 2 <= length <= len(words) - at:
            raise damaged("the length of a step")
        yield words[at : at + length]
        at += length


def parameters(step: list[int], values: list[int]) -> bytes:
    """The parameters of a launch, given all values of a call."""
    size, places = step[11], step[12]
    made = bytearray(size)
    for i in range(programs.KERNEL_WORDS, programs.KERNEL_WORDS + 2 * places, 2):
        place, more = step[i], step[i + 1]
        byte, width = place & 0xFFFF, place >> 16 & 0xFF
        value = values[place >> 32] + (values[more] if more >= 0 else 0)
        made[byte : byte + width] = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")
    return bytes(made)


class PythonExecutor:
    """The kernels of a process, and the launches of programs."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._cubins: dict[int, bytes] = {}
        self._handles: dict[int, int] = {}
        self._shared: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def add_kernel(self, identity: int, cubin: bytes) -> None:
        """Make a cubin known by its id."""
        self._cubins.setdefault(identity, cubin)

    def start(self, words: np.ndarray[tuple[int], np.dtype[np.int64]], device: int) -> programs.Start:
        """What makes the launches of a program on ``device``, which is current then. It raises DriverError."""
        listed = words.tolist()

        def start(stream: int, values: bytes) -> None:
            self.run(listed, struct.unpack(f"<{len(values) // 8}q", values), stream, device)

        return start

    def run(self, words: list[int], given: tuple[int, ...], stream: int, device: int | None = None) -> None:
        """Make the launches of a program.

        Args:
            words: the program.
            given: addresses of its arrays, then its numbers unless it has them itself.
            stream: where, of the current context.
            device: whose context to make current where the thread has none; None: it has one.

        Raises ProgramError, DeviceMismatchError or DriverError.
        """
        if len(words) < programs.HEADER_WORDS or words[0] != programs.MAGIC << 8 | programs.FORMAT:
            raise damaged("its format")
        if words[_OWN] not in (0, words[_NUMBERS]):
            raise damaged("its values")
        own = words[programs.HEADER_WORDS : programs.HEADER_WORDS + words[_OWN]]
        values = [next(NUMBERS), *given, *own]
        if len(values) != 1 + sum(words[_ARGUMENTS]):
            raise damaged("its values")
        here = self._check_device(words, device)
        for step in steps_of(words):
            if step[0] == programs.KERNEL:
                if values[step[7]]:
                    self._launch(step, values, stream, here)
            elif step[0] == programs.CLEAR:
                array, size = values[step[2]], values[step[3]]
                if size < 0:
                    raise too_many(f"clearing {size} bytes")
                self.driver.clear(array, size, stream)
            elif step[0] == programs.COPY:
                argument, result, size = (values[place] for place in step[2:5])
                if size < 0:
                    raise too_many(f"a copy of {size} bytes")
                if argument != result:
                    self.driver.copy(argument, result, size, stream)
            else:
                raise damaged("an unknown step")

    def _check_device(self, words: list[int], device: int | None) -> int:
        here = self.driver.current_device(or_that_of=device)
        found = self.driver.capability(here), self.driver.multiprocessors(here)
        if found != tuple(words[1:3]):
            raise DeviceMismatchError(
                f"compiled for sm_{words[1]} with {words[2]} multiprocessors, "
                f"but GPU {here} is sm_{found[0]} with {found[1]}"
            )
        return here

    def _launch(self, step: list[int], values: list[int], stream: int, device: int) -> None:
        entry = struct.pack("<4q", *step[3:7]).rstrip(b"\0").decode()
        handle = self.handle(step[2] & (2**64 - 1), entry, step[9], device)
        blocks = values[step[7]]
        if not 0 < blocks <= _MOST_BLOCKS:
            raise too_many(f"a launch of {blocks} blocks")
        self.driver.launch(handle, parameters(step, values), blocks, step[8], step[9], stream, bool(step[10]))

    def handle(self, identity: int, entry: str, shared: int, device: int) -> int:
        """The handle of a kernel that may use ``shared`` bytes on ``device``. Raises ProgramError where there is no
        machine code of it, or DriverError."""
        with self._lock:
            handle = self._handles.get(identity)
            if handle is None:
                cubin = self._cubins.get(identity)
                path = FOLDER / f"{identity:016x}.cubin"
                if cubin is None and not path.is_file():
                    raise ProgramError(f"no machine code {identity:016x} in this version of kdacore")
                with self.driver.while_recording():
                    handle = self.driver.load_kernel(path.read_bytes() if cubin is None else cubin, entry)
                self._handles[identity] = handle
            if shared > max(STATIC_SHARED, self._shared.get((identity, device), 0)):
                with self.driver.while_recording():
                    self.driver.allow_shared(handle, shared, device)
                self._shared[identity, device] = shared
        return handle
