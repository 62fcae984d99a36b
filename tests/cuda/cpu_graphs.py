"""CUDA graphs on a CPU: what is captured is noted, not run, and a replay makes the same launches on the same memory.

Launches go to the emulator; torch's operators are noted as they are dispatched. As in a pool that graphs share, memory
that a capture took holds nothing between replays: all of it is NaN when a graph of the pool is replayed. So what a
graph does not compute itself, or what outlives it in a cache, does not go unnoticed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kdacore_cuda.runtime import executor

_READS_VALUES = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")
"""Operators for which the host waits: on a GPU they end a capture with an error."""


class CpuGraph:
    """What was captured."""

    def __init__(self, pool: CpuGraphs) -> None:
        self.steps: list[Callable[[], Any]] = []
        self._pool = pool

    def replay(self) -> None:
        self._pool.poison()
        for step in self.steps:
            step()


class CpuGraphs:
    """Graphs that share their memory, as an engine captures them. Made inside the ``emulated`` fixture."""

    device = "cpu"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._memory: list[torch.UntypedStorage] = []
        self._open: CpuGraph | None = None
        plain = executor.start_of

        def start_of(program: Any, arch: str, index: int) -> Any:
            start = plain(program, arch, index)

            def recorded(stream: int, values: bytes) -> None:
                launch = functools.partial(start, stream, values)
                if self._open is None:
                    launch()
                else:
                    self._open.steps.append(launch)

            return recorded

        monkeypatch.setattr(executor, "start_of", start_of)

    def warm_up(self, step: Callable[[], Any]) -> None:
        step()

    def capture(self, step: Callable[[], Any]) -> tuple[CpuGraph, Any]:
        graph = CpuGraph(self)
        with self._recording(graph), _Operators(graph.steps, self._memory):
            return graph, step()

    @contextlib.contextmanager
    def _recording(self, graph: CpuGraph) -> Iterator[None]:
        self._open = graph
        try:
            yield
        finally:
            self._open = None

    def poison(self) -> None:
        """All that graphs of this pool allocated is NaN."""
        for storage in self._memory:
            storage.fill_(255)


class _Operators(TorchDispatchMode):
    """Notes torch's operators. Those that write are not run; of others the results are there, to be computed anew."""

    def __init__(self, steps: list[Callable[[], Any]], memory: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self._steps, self._memory = steps, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _READS_VALUES:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        if func._schema.is_mutable:
            self._steps.append(functools.partial(func, *args, **kwargs))
            return kwargs.get("out", args[0])
        made = func(*args, **kwargs)
        if not isinstance(made, torch.Tensor) or func._schema.returns[0].alias_info is not None:
            return made  # a view
        self._memory.append(made.untyped_storage())
        if name.startswith(("empty", "new_empty")):
            made.untyped_storage().fill_(
                255
            )  # also what guarded_memory writes around arrays, which is noted here
        else:
            self._steps.append(lambda: made.copy_(func(*args, **kwargs)))
        return made
