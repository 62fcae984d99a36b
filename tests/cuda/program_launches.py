"""What a program launches, given a call's values: as both executors tell a driver that makes no launches, which have to
agree."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from stub_driver import Memory, Recorder

from kdacore_cuda.kernel_parameters import ParamStruct
from kdacore_cuda.runtime import program as programs
from kdacore_cuda.runtime import python_executor
from kdacore_cuda.runtime.program import Clear, Launch, Program

FIRST_NUMBER = 2**40
"""The launch number of the first call; those of later ones follow."""


numbers: Iterator[int] | None = None
"""Launch numbers that a test wants instead."""


class _Executors:
    """Both, with the same launch numbers."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.recorder = Recorder(Path(self._folder.name))
        self.native = self.recorder.executor("native", FIRST_NUMBER)
        self.python = self.recorder.executor("python")
        self._numbers = count(FIRST_NUMBER)

    def events(self, words: Any, values: bytes) -> list[Any]:
        """What the driver is told."""
        self.native.start(words, 0)(0, values)
        native = self.recorder.take()
        others, python_executor.NUMBERS = python_executor.NUMBERS, self._numbers
        try:
            self.python.start(words, 0)(0, values)
        finally:
            python_executor.NUMBERS = others
        assert native == self.recorder.take(), "the executors tell the driver different things"
        return native


executors = cache(_Executors)


@cache
def _words(program: Program) -> Any:
    """The program for the driver above, to which both know the kernels."""
    params: dict[Any, ParamStruct] = {
        x.kernel.source: x.kernel.params for x in program.steps if isinstance(x, Launch)
    }
    made: Any = programs.cubin_of
    programs.cubin_of = lambda kernel, arch: (1 + params[kernel].size, Recorder.code(params[kernel].size))
    try:
        words, cubins = program.words("sm_90a", 90, 132)
    finally:
        programs.cubin_of = made
    for identity, cubin in cubins.items():
        for executor in (executors().native, executors().python):
            executor.add_kernel(identity, cubin)
    return words


def launches_of(program: Program, values: bytes) -> Iterator[tuple[Launch, int, bytes]]:
    """The launches of a call with their blocks and parameters; memory on the CPU is cleared where a step says so."""
    events = iter(executors().events(_words(program), values))
    wanted = None if numbers is None else next(numbers).to_bytes(8, "little")
    given = dict(
        zip((*program.arrays, *program.numbers), np.frombuffer(values, np.int64).tolist(), strict=True)
    )
    for step in program.steps:
        if isinstance(step, Launch):
            if given[step.grid]:
                launched = next(events)
                parameters = launched.parameters
                places = program._places[step.name]
                at = next((byte for byte, _, name, _ in places if name == programs.LAUNCH), None)
                if wanted is not None and at is not None:
                    parameters = parameters[:at] + wanted + parameters[at + 8 :]
                yield step, launched.grid[0], parameters
        elif isinstance(step, Clear):
            if given[step.size]:
                cleared = next(events)
                assert cleared == Memory(given[step.array], None, given[step.size])
                ctypes.memset(cleared.to, 0, cleared.size)
        else:
            raise TypeError(f"{type(step).__name__}: programs of torch's calls have no such steps")
    assert next(events, None) is None
