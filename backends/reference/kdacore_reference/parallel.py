"""Slabs over the cores, for NumPy.

NumPy's element-wise work uses one core, and a BLAS that starts threads inside each small product spends its time
waking them. So slabs are worked on by as many Python threads as the BLAS would have used, each calling it with one
thread. The scan goes from slab to slab, but all that comes before and after it does not, and takes as long: while one
thread scans, others prepare and finish. Scanning all heads at once, in half as many calls, takes the interpreter lock
half as often as a thread for every half of them.

torch and JAX spread their own work and run slab after slab.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from kdacore import forks
from kdacore.types import ArrayKind
from kdacore_reference.plan import Slab, Unit

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


def _renew_in_child() -> None:
    """A forked child has none of the threads that were inside, and would wait for them to leave."""
    global _single_threaded
    left, _single_threaded = _single_threaded, _SingleThreaded()
    if left.inside and (blas := _bundled_openblas()) is not None:
        blas.set_threads(left.before)


forks.renew_in_child(_renew_in_child)


class Work(Protocol):
    """What is done with the slabs of a unit. Only ``scan`` hands something from slab to slab; of different slabs
    ``prepare`` and ``finish`` may run at the same time and in any order."""

    def slabs(self, unit: Unit) -> Sequence[Slab]:
        """In the order in which they are scanned."""

    def begin(self, unit: Unit) -> Any:
        """What the first scan carries."""

    def prepare(self, unit: Unit, slab: Slab) -> Any: ...

    def scan(self, unit: Unit, slab: Slab, prepared: Any, carried: Any) -> tuple[Any, Any]:
        """What is to be finished, and what the next scan carries."""

    def finish(self, unit: Unit, slab: Slab, scanned: Any) -> None: ...

    def end(self, unit: Unit, carried: Any) -> None:
        """After the last scan."""


def run_units(kind: ArrayKind, work: Work, units: Sequence[Unit]) -> None:
    """All of ``work`` for every unit; an exception of any part is raised here.

    The BLAS has one thread whether or not parts run side by side, so that no bit depends on which it is.
    """
    blas = _bundled_openblas() if kind == "numpy" else None
    if blas is None:
        _one_by_one(work, units)
        return
    with _single_threaded.hold(blas) as threads:
        if threads < 2 or sum(unit.size for unit in units) < WORTH_THREADS:
            _one_by_one(work, units)
            return
        relay = _Relay(work, units)
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(relay.run) for _ in range(threads)]:
                done.result()


def _one_by_one(work: Work, units: Sequence[Unit]) -> None:
    for unit in units:
        carried = work.begin(unit)
        for slab in work.slabs(unit):
            scanned, carried = work.scan(unit, slab, work.prepare(unit, slab), carried)
            work.finish(unit, slab, scanned)
        work.end(unit, carried)


@dataclass
class _Baton:
    """What the scan of a unit hands from slab to slab."""

    carried: Any
    scanned: int = 0


class _Leg(NamedTuple):
    unit: Unit
    slab: Slab
    number: int
    baton: _Baton


class _Relay:
    """Every thread takes a slab from its preparation to its end, so that what it makes stays in its core's cache. Only
    the scan waits for that of the slab before; others are prepared and finished meanwhile."""

    def __init__(self, work: Work, units: Sequence[Unit]) -> None:
        self.work = work
        self.changed = threading.Condition()
        self.failed = False
        by_unit = []
        for unit in units:
            baton = _Baton(work.begin(unit))
            by_unit.append([_Leg(unit, slab, i, baton) for i, slab in enumerate(work.slabs(unit))])
            if not by_unit[-1]:
                work.end(unit, baton.carried)
        # The units in turn, as legs of the same one wait for each other. None is taken before the one it waits for.
        self.legs = iter([leg for legs in zip_longest(*by_unit) for leg in legs if leg is not None])

    def run(self) -> None:
        """Until every leg is done, or any thread has failed."""
        try:
            while (leg := self._next()) is not None:
                self._run_leg(leg)
        except BaseException:
            with self.changed:
                self.failed = True
                self.changed.notify_all()
            raise

    def _next(self) -> _Leg | None:
        with self.changed:
            return None if self.failed else next(self.legs, None)

    def _run_leg(self, leg: _Leg) -> None:
        work, (unit, slab, number, baton) = self.work, leg
        prepared = work.prepare(unit, slab)
        with self.changed:
            self.changed.wait_for(lambda: self.failed or baton.scanned == number)
            if self.failed:
                return
        scanned, baton.carried = work.scan(unit, slab, prepared, baton.carried)
        if number + 1 == len(unit.slabs):
            work.end(unit, baton.carried)
        with self.changed:
            baton.scanned += 1
            self.changed.notify_all()
        work.finish(unit, slab, scanned)
