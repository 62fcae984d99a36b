"""A call's launches as numbers, for the handler that makes them from inside XLA's programs
(csrc/ffi_handler.c, and :mod:`kdacore_cuda.jax.python_handler` where that does not load).

A program is a row of 64-bit words: a header of :data:`HEADER_WORDS`, then steps one after another.

| header | steps that launch a kernel | steps that clear memory | steps that copy an array |
|---|---|---|---|
| :data:`MAGIC` and :data:`FORMAT` | :data:`KERNEL`, words of the step | :data:`CLEAR`, words | :data:`COPY`, words |
| compute capability, times 10 | id and entry (4 words) of the kernel | array | argument |
| multiprocessors | blocks, threads, shared bytes | offset in bytes | result |
| arguments of the call | 1 if it may start before the launch ahead has ended | bytes | bytes |
| results of the call | bytes of its parameters, number of places | | |
| steps | places, two words each; the parameters | | |

A place says where in the parameters an address goes: byte and array (the upper 32 bits) in its first
word, an offset in bytes in its second. Arrays are counted through the arguments and on through the
results; :data:`LAUNCH_NUMBER` stands for a number that differs from call to call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from kdacore_cuda.build.cubin_lookup import load_or_compile
from kdacore_cuda.build.kernel_source import KernelSource
from kdacore_cuda.runtime.launch_sequence import PlannedLaunch, check_launches
from kdacore_cuda.runtime.launcher import overlaps_launches

MAGIC, FORMAT = 0x6B6461636F7265, 2
KERNEL, CLEAR, COPY = 1, 2, 3
HEADER_WORDS, KERNEL_WORDS, CLEAR_WORDS, COPY_WORDS, ENTRY_BYTES = 6, 13, 5, 5, 32
LAUNCH_NUMBER = 0xFFFFFFFF
LAUNCH_FIELD = "launch"
"""The array name that stands for the launch number in :attr:`PlannedLaunch.arrays`."""


class Clear(NamedTuple):
    """A step that sets the first ``size`` bytes of an array to zero."""

    array: str
    size: int


class InPlace(NamedTuple):
    """A step that copies an argument of ``size`` bytes to a result, unless they are the same memory. In later
    steps the argument's name stands for the result.

    XLA is told that they are to be the same, and they mostly are. Not so where it hands over slices of larger
    arrays, as for a loop whose body it fuses with them: then it gives both their own memory and copies nothing.
    """

    argument: str
    result: str
    size: int


Step = PlannedLaunch | Clear | InPlace


class Program(NamedTuple):
    """The launches of one call."""

    words: np.ndarray[tuple[int], np.dtype[np.int64]]
    cubins: dict[int, bytes]
    """Machine code of its kernels by id."""


@cache
def _cubin(kernel: KernelSource, arch: str) -> tuple[int, bytes]:
    """The id of a kernel's cubin, and the cubin. BackendBuildError where it cannot be compiled."""
    cubin = load_or_compile(kernel, arch)
    return cubin_id(cubin), cubin


def cubin_id(cubin: bytes) -> int:
    """The first 64 bits of a cubin's sha256, which also name the packaged file; never 0."""
    return int.from_bytes(hashlib.sha256(cubin).digest()[:8], "big") or 1


def make_program(
    steps: Sequence[Step],
    arguments: Sequence[str],
    results: Sequence[str],
    arch: str,
    capability: int,
    multiprocessors: int,
) -> Program:
    """The program of a call.

    Args:
        steps: what it does, in order. Launches of 0 blocks are left out.
        arguments: names of the arrays that it is given.
        results: names of the arrays that it writes, in the order in which XLA allocates them. A name
            that is an argument too is the same memory.
        arch: the real architecture whose machine code to use.
        capability: compute capability of the device, times 10.
        multiprocessors: of the device.

    Raises:
        BackendBuildError: a kernel had to be compiled, and could not be.
        ValueError: a launch takes an array that is neither argument nor result, or may not follow the one ahead.
    """
    check_launches(steps)
    numbers = {name: i for i, name in enumerate((*arguments, *results))} | {LAUNCH_FIELD: LAUNCH_NUMBER}
    cubins: dict[int, bytes] = {}
    made: list[int] = []
    count = 0
    for step in steps:
        if isinstance(step, Clear):
            words = [CLEAR, CLEAR_WORDS, _number(numbers, step.array), 0, step.size]
        elif isinstance(step, InPlace):
            pair = _number(numbers, step.argument), _number(numbers, step.result)
            words = [COPY, COPY_WORDS, *pair, step.size]
            numbers[step.argument] = numbers[step.result]
        elif step.grid:
            identity, cubin = _cubin(step.launcher.kernel, arch)
            cubins[identity] = cubin
            words = _kernel_words(step, identity, numbers, overlaps_launches(arch))
        else:
            continue
        made += words
        count += 1
    header = [MAGIC << 8 | FORMAT, capability, multiprocessors, len(arguments), len(results), count]
    return Program(np.array([*map(_signed, header + made)], np.int64), cubins)


def _kernel_words(step: PlannedLaunch, identity: int, numbers: dict[str, int], overlaps: bool) -> list[int]:
    launcher = step.launcher
    fields = [name for name, _ in launcher.params.fields]
    unknown = (step.arrays.keys() | step.fixed.keys()) - set(fields)
    if unknown:
        raise ValueError(f"{step.name}: no such fields: {', '.join(sorted(unknown))}")
    params = launcher.params.packer.pack(*(step.fixed.get(name, 0) for name in fields))
    entry = launcher.kernel.entry.encode()
    if len(entry) > ENTRY_BYTES:
        raise ValueError(f"{launcher.kernel.entry}: longer than {ENTRY_BYTES} bytes")
    places: list[int] = []
    for field, (array, offset) in step.arrays.items():
        places += [launcher.params.offsets[field] | _number(numbers, array) << 32, offset]
    words = [
        *(KERNEL, KERNEL_WORDS + len(places) + len(params) // 8, identity),
        *_as_words(entry.ljust(ENTRY_BYTES, b"\0")),
        *(step.grid, launcher.threads, launcher.shared, int(overlaps)),
        *(len(params), len(places) // 2),
    ]
    return [*words, *places, *_as_words(params)]


def _as_words(data: bytes) -> list[int]:
    return [int(x) for x in np.frombuffer(data, np.int64)]


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _number(numbers: dict[str, int], name: str) -> int:
    if name not in numbers:
        raise ValueError(f"an array that no call has: {name}")
    return numbers[name]
