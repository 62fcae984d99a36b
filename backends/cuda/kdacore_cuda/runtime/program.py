"""A call's launches as data. Forms describe them here; the executor makes them (:mod:`kdacore_cuda.runtime.executor`),
whoever calls: eager torch, autograd, CUDA graphs, ranks and XLA's programs.

A program is a list of steps and the names of the values they take: arrays, of which a call gives addresses, and
numbers, such as its lengths. A value goes to the field of the kernels' parameters that has its name, so a step names
only what is called otherwise. Programs do not depend on lengths: all calls that launch the same kernels have the same
one.

For the executor a program is a row of 64-bit words: a header, then the program's own numbers (or none, if calls give
them), then its steps.

| header | steps that launch a kernel | steps that clear memory | steps that copy an array |
|---|---|---|---|
| :data:`MAGIC` and :data:`FORMAT` | :data:`KERNEL`, words of the step | :data:`CLEAR`, words | :data:`COPY`, words |
| compute capability, times 10 | id and entry (4 words) of the kernel | array, bytes | argument, result, bytes |
| multiprocessors | blocks | | |
| arguments, results and numbers of a call | threads, shared bytes | | |
| numbers that the program has itself | 1 if it may start before the launch ahead has ended | | |
| steps | bytes of its parameters, number of places | | |
| | places, two words each; the parameters | | |

Arrays, bytes and blocks are numbers of values: 0 is a number that differs from call to call (:data:`LAUNCH`), then
come arguments, results, and numbers. A place says where in the parameters a value goes: in its first word the byte, the
width (from bit 16) and the value (from bit 32), in its second another value that is added, or -1.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from kdacore_cuda.architectures import overlaps_launches
from kdacore_cuda.build.cubin_lookup import load_or_compile
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.runtime.kernel import Kernel
from kdacore_cuda.runtime.launch_order import OTHER_WORK, check_order

MAGIC, FORMAT = 0x6B6461636F7265, 3
KERNEL, CLEAR, COPY = 1, 2, 3
HEADER_WORDS, KERNEL_WORDS, ENTRY_BYTES = 8, 13, 32
LAUNCH = "launch number"
"""The value that differs from call to call."""

NOTHING = ""
"""In the place of a value: the field is 0."""
Value = str | tuple[str, str]
"""A value by its name, or the sum of two: a buffer and an offset in it, in bytes."""
_INT32, _INT64, _FLOAT32 = "i4x", "q", "f4x"
"""How :mod:`struct` packs a number in 64 bits."""
_FORMATS = {"ptr": (_INT64, 8), "i64": (_INT64, 8), "i32": (_INT32, 4), "f32": (_FLOAT32, 4)}
"""Kind of a field to the format of the numbers that it holds, and its width."""
Start = Callable[[int, bytes], None]
"""``start(stream, values)`` makes the launches of a program. ``values``: :meth:`Program.pack_addresses`, then
:meth:`Program.pack_numbers`."""


class Launch(NamedTuple):
    """A step that launches a kernel."""

    name: str
    kernel: Kernel
    grid: str
    """The number of blocks. A launch of 0 blocks is left out."""
    fields: Mapping[str, Value] = {}
    """Field of the parameters to the value that it holds, where that is not the one of the field's own name. Fields
    without a value are 0."""


class Clear(NamedTuple):
    """A step that sets the first ``size`` bytes of an array to zero."""

    array: str
    size: str


class InPlace(NamedTuple):
    """A step that copies an argument of ``size`` bytes to a result, unless they are the same memory. In later
    steps the argument's name stands for the result.

    XLA is told that they are to be the same, and they mostly are. Not so where it hands over slices of larger
    arrays, as for a loop whose body it fuses with them: then it gives both their own memory and copies nothing.
    """

    argument: str
    result: str
    size: str


Step = Launch | Clear | InPlace


class Program:
    """Launches in the order in which they are made.

    Args:
        steps: what they are.
        arrays: names of the arrays whose addresses a call gives, in that order; 0 for an absent one.
        numbers: names of the numbers that a call may give.
        one_segment: no sequence is cut into segments.

    Raises ValueError where a step names a value that no call gives, or a launch may not follow the one ahead.
    """

    def __init__(
        self, steps: Sequence[Step], arrays: Sequence[str], numbers: Sequence[str], one_segment: bool = False
    ) -> None:
        self.steps, self.arrays, self.one_segment = tuple(steps), tuple(arrays), one_segment
        entries = [x.kernel.source.entry if isinstance(x, Launch) else OTHER_WORK for x in steps]
        check_order(entries, one_segment=one_segment)
        self._formats: dict[str, str] = {}
        """Of the numbers that steps take, by name."""
        self._in_both_widths: set[str] = set()
        """Those that 32-bit fields hold, and something of 64 bits too."""
        known = {*arrays, *numbers}
        self._places = {x.name: self._places_of(x, known) for x in self.steps if isinstance(x, Launch)}
        for step in self.steps:
            name = step.grid if isinstance(step, Launch) else step.size
            self._note(name, _INT64, known, name)
        self.numbers = tuple(self._formats)
        """Names of the numbers that a call gives, in the order of the steps: XLA's cache, and the processes of one job,
        compare programs."""
        self._pack_numbers = struct.Struct("<" + "".join(self._formats.values())).pack
        self._take_numbers = _taking(self.numbers)
        self.pack_addresses = struct.Struct(f"<{len(self.arrays)}q").pack
        """The addresses of a call's arrays, for :data:`Start`."""

    def _note(self, name: str, text: str, known: set[str], of: str) -> None:
        if name not in known:
            raise ValueError(f"{of}: no call gives {name}")
        if name in self.arrays:
            return
        found = self._formats.setdefault(name, text)
        if {found, text} == {_INT32, _INT64}:
            self._formats[name] = _INT64
            self._in_both_widths.add(name)
        elif found != text:
            raise ValueError(f"{of}: {name} is a float32 here and an integer elsewhere")

    def _places_of(self, step: Launch, known: set[str]) -> list[tuple[int, int, str, str | None]]:
        """Where values go in the parameters of a launch: byte, width, value, another value or None."""
        unknown = step.fields.keys() - step.kernel.params.offsets.keys()
        if unknown:
            raise ValueError(f"{step.name}: no such fields: {', '.join(sorted(unknown))}")
        places: list[tuple[int, int, str, str | None]] = []
        for field, kind in step.kernel.params.fields:
            value = step.fields.get(field, field)
            if value == NOTHING:
                continue
            if value == LAUNCH:
                places.append((step.kernel.params.offsets[field], 8, LAUNCH, None))
            elif value != field or field in known:
                name, offset = (value, None) if isinstance(value, str) else value
                text, width = _FORMATS[kind]
                if width < 8 and (offset is not None or name in self.arrays):
                    raise ValueError(f"{step.name}: {field} has {8 * width} bits, an address has 64")
                self._note(name, text, known, step.name)
                if offset is not None:
                    self._note(offset, _INT64, known, step.name)
                places.append((step.kernel.params.offsets[field], width, name, offset))
        return places

    def pack_numbers(self, given: Mapping[str, float]) -> bytes:
        """The numbers of a call, for :data:`Start`. KeyError where one is missing, struct.error where one is too large
        for one of its fields: an executor writes the lower bits alone."""
        for name in self._in_both_widths:
            if not -(2**31) <= given[name] < 2**31:
                raise struct.error(f"{name}: {given[name]} is too large for a field of 32 bits that holds it")
        return self._pack_numbers(*self._take_numbers(given))

    def words(
        self,
        arch: str,
        capability: int,
        multiprocessors: int,
        arguments: Sequence[str] | None = None,
        results: Sequence[str] = (),
        own: bytes = b"",
        same: Mapping[str, str] = {},
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], dict[int, bytes]]:
        """The program for the executor, and the machine code of its kernels by id.

        Args:
            arch: the real architecture whose machine code to use.
            capability: compute capability of the device, times 10.
            multiprocessors: of the device.
            arguments: names of the arrays that a call is given; all of :attr:`arrays` if None.
            results: names of the arrays that it writes besides. Fields for arrays that are neither are 0.
            own: the numbers, if calls do not give them.
            same: further names of arrays.

        Raises BackendBuildError where a kernel had to be compiled, and could not be.
        """
        names = (LAUNCH, *(self.arrays if arguments is None else arguments), *results)
        places = {name: i for i, name in enumerate((*names, *self.numbers))}
        places |= {name: places[x] for name, x in same.items()}
        cubins: dict[int, bytes] = {}
        made: list[int] = []
        count = 0
        for step in self.steps:
            if isinstance(step, Clear):
                if step.array not in places:  # it has no bytes
                    continue
                made += [CLEAR, 4, places[step.array], places[step.size]]
            elif isinstance(step, InPlace):
                pair = places[step.argument], places[step.result]
                made += [COPY, 5, *pair, places[step.size]]
                places[step.argument] = places[step.result]
            else:
                identity, cubin = cubin_of(step.kernel.source, arch)
                cubins[identity] = cubin
                made += self._kernel_words(step, identity, arch, places)
            count += 1
        counts = [len(names) - 1 - len(results), len(results), len(self.numbers), len(own) // 8]
        header = [MAGIC << 8 | FORMAT, capability, multiprocessors, *counts, count]
        words = np.array([word % 2**64 for word in (*header, *_as_words(own), *made)], np.uint64)
        return words.view(np.int64), cubins

    def _kernel_words(self, step: Launch, identity: int, arch: str, numbers: Mapping[str, int]) -> list[int]:
        entry, size, places = step.kernel.source.entry, step.kernel.params.size, []
        for byte, width, name, offset in self._places[step.name]:
            if name in numbers:
                more = -1 if offset is None else numbers[offset]
                places += [byte | width << 16 | numbers[name] << 32, more]
        if len(entry) > ENTRY_BYTES:
            raise ValueError(f"{entry}: longer than {ENTRY_BYTES} bytes")
        return [
            *(KERNEL, KERNEL_WORDS + len(places) + size // 8, identity),
            *_as_words(entry.encode().ljust(ENTRY_BYTES, b"\0")),
            *(numbers[step.grid], *step.kernel.block(arch), int(overlaps_launches(arch))),
            *(size, len(places) // 2),
            *(*places, *[0] * (size // 8)),
        ]


def _taking(names: tuple[str, ...]) -> Callable[[Mapping[str, float]], tuple[Any, ...]]:
    """What takes the values of some names out of a mapping."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda given: tuple([given[name] for name in names])


@cache
def cubin_of(kernel: KernelSource, arch: str) -> tuple[int, bytes]:
    """The id of a kernel's cubin, and the cubin. BackendBuildError where it cannot be compiled."""
    cubin = load_or_compile(kernel, arch)
    return cubin_id(cubin), cubin


def cubin_id(cubin: bytes) -> int:
    """The first 64 bits of a cubin's sha256, which also name the packaged file; never 0."""
    return int.from_bytes(hashlib.sha256(cubin).digest()[:8], "big") or 1


def _as_words(data: bytes) -> list[int]:
    return [int(x) for x in np.frombuffer(data, np.int64)]
