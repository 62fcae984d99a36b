"""The executor of this process: the packaged native one, else one in Python. Every launch goes through it."""

from __future__ import annotations

import warnings
from functools import cache

from kdacore.errors import PerformanceWarning
from kdacore_cuda.build import packaged_executors
from kdacore_cuda.runtime import driver
from kdacore_cuda.runtime.native_executor import NativeExecutor
from kdacore_cuda.runtime.program import Program, Start
from kdacore_cuda.runtime.python_executor import PythonExecutor

Executor = NativeExecutor | PythonExecutor
"""What makes the launches of programs."""


@cache
def executor() -> Executor:
    """That of this process. Warns where it is not the native one. OSError where there is no driver."""
    found = packaged_executors.find_executor()
    try:
        if not isinstance(found, str):
            return NativeExecutor(found)
    except OSError as error:
        found = str(error)
    here = PythonExecutor(driver.driver())
    warnings.warn(
        f"kdacore's native executor does not load ({found}); launches are made by Python, tens of microseconds each, "
        "and from JAX milliseconds beside a busy Python thread",
        PerformanceWarning,
        stacklevel=2,
    )
    return here


_starts: dict[tuple[Program, int], Start] = {}
"""By program and device."""


def start_of(program: Program, arch: str, device: int) -> Start:
    """What makes the launches of a program on ``device`` (whose machine code is that of ``arch``), which must be
    current when this is called and when the function is.

    Raises BackendBuildError or DriverError; the function raises DriverError.
    """
    return _starts.get((program, device)) or _new_start(program, arch, device)


def _new_start(program: Program, arch: str, device: int) -> Start:
    chosen = driver.driver()
    words, cubins = program.words(arch, chosen.capability(device), chosen.multiprocessors(device))
    here = executor()
    for identity, cubin in cubins.items():
        here.add_kernel(identity, cubin)
    start = _starts[program, device] = here.start(words, device)
    return start
