"""Independent units over the cores, for NumPy.

NumPy's element-wise work uses one core, and a BLAS that starts threads inside each small product spends its time
waking them. So NumPy units run on as many Python threads as the BLAS would have used, each calling it with one thread.
torch and JAX spread their own work and run unit after unit.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kdacore.types import ArrayKind
from kdacore_reference.plan import Unit

WORTH_THREADS = 64
"""Chunks times value heads from which starting threads pays."""


class _Blas(NamedTuple):
    get_threads: Callable[[], int]
    set_threads: Callable[[int], None]


@cache
def _bundled_openblas() -> _Blas | None:
    """Thread control of the OpenBLAS inside NumPy's wheel; None for a NumPy built otherwise."""
    folder = Path(np.__file__).parent
    for path in sorted([*folder.parent.glob("numpy.libs/*openblas*"), *folder.glob(".dylibs/*openblas*")]):
        library = ctypes.CDLL(str(path))
        for pattern in ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads"):
            if hasattr(library, pattern.format("get")) and hasattr(library, pattern.format("set")):
                return _Blas(getattr(library, pattern.format("get")), getattr(library, pattern.format("set")))
    return None


class _SingleThreaded:
    """Holds the BLAS at one thread while any caller is inside; the last one out restores what was set."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.before = 1

    @contextmanager
    def hold(self, blas: _Blas) -> Iterator[int]:
        """Yields the number of threads the BLAS was allowed."""
        with self.lock:
            if self.inside == 0:
                self.before = blas.get_threads()
                blas.set_threads(1)
            self.inside += 1
        try:
            yield self.before
        finally:
            with self.lock:
                self.inside -= 1
                if self.inside == 0:
                    blas.set_threads(self.before)


_single_threaded = _SingleThreaded()


def run_units(kind: ArrayKind, work: Callable[[Unit], None], units: Sequence[Unit]) -> None:
    """``work(unit)`` for every unit; an exception of any of them is raised here.

    The BLAS has one thread whether or not units run side by side, so that no bit depends on which it is.
    """
    blas = _bundled_openblas() if kind == "numpy" else None
    if blas is None:
        for unit in units:
            work(unit)
        return
    with _single_threaded.hold(blas) as threads:
        if threads < 2 or len(units) < 2 or sum(unit.size for unit in units) < WORTH_THREADS:
            for unit in units:
                work(unit)
            return
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work, unit) for unit in units]:
                done.result()
