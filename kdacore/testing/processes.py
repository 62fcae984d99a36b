"""Calls in several processes at once, where one that kills its process, or breaks the device for it, fails alone."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Work(Generic[Item, Found]):
    """What every process does; its functions are pickled."""

    run: Callable[[Item], Found]
    failed: Callable[[Found], bool]
    """Whether what was found is a failure: then the process asks whether its device still answers."""
    lost: Callable[[Item, str], Found]
    """What to say of an item whose process ended, and in which words."""


@dataclass
class _Worker(Generic[Item]):
    process: Any
    pipe: Any
    given: list[Item] = field(default_factory=list)
    """The item it works on; it holds one at a time, so a dead one tells which call killed it."""

    def give(self, item: Item) -> None:
        self.given = [item]
        with contextlib.suppress(ConnectionError):  # it has ended: receiving says so
            self.pipe.send(item)


def run(work: Work[Item, Found], items: Iterator[Item], jobs: int) -> Iterator[Found]:
    """Yields the result of each item as soon as it is known; ``jobs`` processes share the items."""
    workers: list[_Worker[Item]] = []
    try:
        for item in itertools.islice(items, jobs):
            workers.append(_start(work))
            workers[-1].give(item)
        while workers:
            ready = multiprocessing.connection.wait([w.pipe for w in workers])
            for worker in [w for w in workers if w.pipe in ready]:
                yield _receive(work, worker, workers, items)
    finally:
        for worker in workers:
            worker.process.terminate()


def _receive(
    work: Work[Item, Found], worker: _Worker[Item], workers: list[_Worker[Item]], left: Iterator[Item]
) -> Found:
    """What came of the worker's item; gives it, or one in its place, the next."""
    usable = False
    try:
        found, usable = worker.pipe.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        text = f"the call ended its process (exit code {worker.process.exitcode})"
        found = work.lost(worker.given[0], text)
    following = list(itertools.islice(left, 1))
    if not following or not usable:
        workers.remove(worker)
        worker.pipe.close()
    if following:
        if not usable:
            worker = _start(work)
            workers.append(worker)
        worker.give(following[0])
    result: Found = found
    return result


def _start(work: Work[Item, Found]) -> _Worker[Item]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(work, there, os.environ.get(_SAFE_PATH)), daemon=True)
    with _safe_path():
        process.start()
    there.close()
    return _Worker(process, here)


_SAFE_PATH = "PYTHONSAFEPATH"
"""Set, it keeps the current folder off a child's path: ``python -c`` would import its ``multiprocessing.py`` first."""


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        _set_safe_path(before)


def _set_safe_path(value: str | None) -> None:
    if value is None:
        os.environ.pop(_SAFE_PATH, None)
    else:
        os.environ[_SAFE_PATH] = value


def _serve(work: Work[Any, Any], pipe: Any, safe_path: str | None) -> None:
    """Run in a worker: a result for every item received, until the pipe closes or the device no longer answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    _set_safe_path(safe_path)  # children of its own see what the caller's would
    # JAX would reserve three quarters of a GPU's memory in each of the processes.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    usable = True
    while usable:
        try:
            item = pipe.recv()
        except EOFError:
            return
        found = work.run(item)
        usable = not work.failed(found) or _device_answers()
        pipe.send((found, usable))


def _device_answers() -> bool:
    """After an illegal access every later CUDA call of the process fails: such a process is done."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # what torch raises for every CUDA error
        return False
    return True
