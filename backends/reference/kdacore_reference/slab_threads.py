"""Slabs worked on by several threads, for NumPy.

NumPy's element-wise work uses one core, and a BLAS that starts threads inside each small product
spends its time waking them. So as many Python threads as the BLAS would use work on slabs, each
calling the BLAS with one thread. The scan goes from slab to slab; the work before and after it does
not, and takes as long. While one thread scans, others prepare and finish. Scanning all heads at
once, in half as many calls, takes the interpreter lock half as often as a thread for every half of
them.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, TypeVar

UnitT = TypeVar("UnitT", contravariant=True)
SlabT = TypeVar("SlabT")


class Work(Protocol[UnitT, SlabT]):
    """The work on the slabs of a unit. Only ``scan`` passes a value from slab to slab; ``prepare``
    and ``finish`` of different slabs may run at the same time and in any order."""

    def slabs(self, unit: UnitT) -> list[SlabT]:
        """The slabs in the order of the scan."""

    def begin(self, unit: UnitT) -> Any:
        """The value carried into the first scan."""

    def prepare(self, unit: UnitT, slab: SlabT) -> Any: ...

    def scan(self, unit: UnitT, slab: SlabT, prepared: Any, carried: Any) -> tuple[Any, Any]:
        """The input of ``finish``, and the value carried into the next scan."""

    def finish(self, unit: UnitT, slab: SlabT, scanned: Any) -> None: ...

    def end(self, unit: UnitT, carried: Any) -> None:
        """After the last scan."""


def run_on_threads(work: Work[Any, Any], units: list[Any], threads: int) -> None:
    """Run ``work`` for every unit on ``threads`` threads. An exception in any of them is raised
    here."""
    slab_threads = _SlabThreads(work, units)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(slab_threads.run) for _ in range(threads)]:
            done.result()


@dataclass
class _ScanState:
    """State of the scan of a unit."""

    carried: Any
    """The value passed from slab to slab."""
    scanned: int = 0
    """Number of slabs scanned so far."""


class _Task(NamedTuple):
    """One slab, from its preparation to its end."""

    unit: Any
    slab: Any
    number: int
    """Position of the slab in the scan of its unit."""
    last: bool
    scan: _ScanState


class _SlabThreads:
    """Work on slabs in several threads. A thread prepares, scans and finishes a slab, so that its
    data stays in one core's cache. A scan waits for that of the slab before; other slabs are
    prepared and finished meanwhile."""

    def __init__(self, work: Work[Any, Any], units: list[Any]) -> None:
        self.work = work
        self.changed = threading.Condition()
        self.failed = False
        by_unit = []
        for unit in units:
            scan = _ScanState(work.begin(unit))
            slabs = work.slabs(unit)
            count = len(slabs)
            by_unit.append([_Task(unit, slab, i, i + 1 == count, scan) for i, slab in enumerate(slabs)])
            if not slabs:
                work.end(unit, scan.carried)
        # One slab of each unit after the other, because slabs of one unit wait for each other. No
        # slab comes before the one it waits for.
        self.tasks = iter([task for tasks in zip_longest(*by_unit) for task in tasks if task is not None])

    def run(self) -> None:
        """Work on slabs until all are done or a thread has failed."""
        try:
            while (task := self._next()) is not None:
                self._run_task(task)
        except BaseException:
            with self.changed:
                self.failed = True
                self.changed.notify_all()
            raise

    def _next(self) -> _Task | None:
        with self.changed:
            return None if self.failed else next(self.tasks, None)

    def _run_task(self, task: _Task) -> None:
        work, (unit, slab, number, last, scan) = self.work, task
        prepared = work.prepare(unit, slab)
        with self.changed:
            self.changed.wait_for(lambda: self.failed or scan.scanned == number)
            if self.failed:
                return
        scanned, scan.carried = work.scan(unit, slab, prepared, scan.carried)
        if last:
            work.end(unit, scan.carried)
        with self.changed:
            scan.scanned += 1
            self.changed.notify_all()
        work.finish(unit, slab, scanned)
