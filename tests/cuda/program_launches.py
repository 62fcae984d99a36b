"""What a program launches, given a call's values: as the executor in Python packs it, without a driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

from kdacore_cuda.runtime import program as programs
from kdacore_cuda.runtime import python_executor
from kdacore_cuda.runtime.program import Launch, Program


@cache
def _words(program: Program) -> list[int]:
    """The program for no machine in particular: kernels have the number of their step for an id."""
    with_numbers = Program.__new__(Program)
    with_numbers.__dict__ = dict(program.__dict__)
    made: Any = programs.cubin_of
    programs.cubin_of = lambda kernel, arch: (1, b"")
    try:
        return with_numbers.words("sm_90a", 90, 132)[0].tolist()
    finally:
        programs.cubin_of = made


def launches_of(program: Program, values: bytes) -> Iterator[tuple[Launch, int, bytes]]:
    """The launches of a call with their blocks and parameters; memory on the CPU is cleared where a step says so."""
    all_values = [next(python_executor.NUMBERS), *struct.unpack(f"<{len(values) // 8}q", values)]
    for step, words in zip(program.steps, python_executor.steps_of(_words(program)), strict=True):
        if isinstance(step, Launch):
            if all_values[words[7]]:
                yield step, all_values[words[7]], python_executor.parameters(words, all_values)
        else:
            ctypes.memset(all_values[words[2]], 0, all_values[words[3]])
