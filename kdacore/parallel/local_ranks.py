"""Ranks that are threads of one process: for tests, and for several ranks' work on one device.

They exchange tensors through memory. On a GPU each thread may have a stream of its own; the tensors of one wait for the
work of the others through events, not on the host. Autograd runs backwards on a GPU in one thread for each device,
in which two ranks would wait for one another: there, run ``backward()`` under
``torch.autograd.set_multithreading_enabled(False)``.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from kdacore.errors import ContractError
from kdacore.parallel.progress import Progress


class _Meeting:
    """What the ranks of one group share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.slots: list[Any] = [None] * size


class LocalRanks:
    """One of several ranks in a process. Made by :func:`local_group`."""

    _numbers: ClassVar[Any] = itertools.count()
    _by_name: ClassVar[weakref.WeakValueDictionary[str, LocalRanks]] = weakref.WeakValueDictionary()

    def __init__(self, meeting: _Meeting, size: int, rank: int, group: int) -> None:
        self.size, self.rank = size, rank
        self.name = f"kdacore.local.{group}.{rank}"
        self.progress = Progress()
        self._meeting = meeting
        self._by_name[self.name] = self

    @classmethod
    def by_name(cls, name: str) -> LocalRanks | None:
        return cls._by_name.get(name)

    def exchange(self, x: Any) -> list[Any]:
        meeting = self._meeting
        meeting.slots[self.rank] = x
        self._meet()
        found = list(meeting.slots)
        self._meet()  # all have read
        return found

    def heads(self, head: Any) -> list[Any]:
        return self.exchange(head)

    def all_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        ready = None
        if x.is_cuda:
            ready = torch.cuda.Event()
            ready.record()

        def wait() -> torch.Tensor:
            parts = []
            for other, event in self.exchange((x, ready)):
                if event is not None:
                    event.wait()
                    other.record_stream(torch.cuda.current_stream())
                parts.append(other)
            return torch.stack(parts)

        return wait

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x)().sum(0)

    def obstacle(self, device: str) -> tuple[str, str] | None:
        return None

    def on_host(self, device: str) -> bool:
        return True

    def gone(self) -> bool:
        return False

    def leave(self) -> None:
        """End the group: the others raise where they wait for this rank. For a rank that has failed."""
        self._meeting.barrier.abort()

    def _meet(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(f"{self.name}: another rank did not come in time, or failed") from None


def local_group(size: int, timeout: float = 60.0) -> tuple[LocalRanks, ...]:
    """Ranks for the threads of one process: each passes its own as ``cp=``.

    Args:
        size: number of ranks.
        timeout: seconds that a rank waits for the others before it raises RuntimeError.

    Raises:
        ContractError: ``size`` is no positive integer.

    Examples:
        >>> from kdacore.parallel import local_group
        >>> [ranks.rank for ranks in local_group(2)]
        [0, 1]
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ContractError("local_group", "size", repr(size), "a positive integer")
    meeting, group = _Meeting(size, timeout), next(LocalRanks._numbers)
    return tuple([LocalRanks(meeting, size, rank, group) for rank in range(size)])
