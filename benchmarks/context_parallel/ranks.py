"""Ranks: one process and GPU each with NCCL, or threads of one process on one GPU."""

from __future__ import annotations

import datetime
import os
import socket
import statistics
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kdacore.bench.clock import Step, Timing, summary

TIMEOUT = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class Rank:
    """This rank."""

    rank: int
    size: int
    cp: Any
    """What a call takes as ``cp=``."""
    device: str
    exchange: Callable[[Any], list[Any]]
    """One object of every rank, in their order."""
    threads: bool

    def barrier(self) -> None:
        torch.cuda.synchronize()
        self.exchange(None)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        if self.threads:
            torch.cuda.synchronize()
            found = torch.stack(self.exchange(x)).sum(0)
            self.barrier()
            return found
        x = x.clone()
        dist.all_reduce(x, group=self.cp)
        return x

    def time(self, step: Step, samples: int) -> Timing:
        """Seconds of a step that all ranks make together, as the last of them ends it."""
        if self.threads:
            raise TypeError("threads share one GPU: what they take together says nothing")
        pause = max(self.exchange(self._queue_seconds(step)))
        flag, taken = torch.zeros(1, device=self.device), []
        for _ in range(samples):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(int(pause * 2.0e9))  # until every host has queued the whole step
            dist.all_reduce(flag, group=self.cp)  # GPUs begin together, whatever their clocks
            start.record()
            step()
            stop.record()
            stop.synchronize()
            taken.append(float(start.elapsed_time(stop)) * 1e-3)
        return summary([max(each) for each in zip(*self.exchange(taken), strict=True)])

    def _queue_seconds(self, step: Step) -> float:
        import time

        seconds = []
        for _ in range(4):
            self.barrier()
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        return min(2 * statistics.median(seconds[1:]), 0.05)


def in_processes(size: int, work: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """``work(rank, *arguments)`` in ``size`` processes with a GPU each; what each returned.

    Raises RuntimeError with the traceback of the first rank that failed, or where they take longer than ``timeout``.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_process, args=(rank, size, port, queue, work, arguments))
        for rank in range(size)
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(timeout)
    late = [rank for rank, p in enumerate(processes) if p.is_alive()]
    for p in processes:
        if p.is_alive():
            p.kill()
            p.join()
    found: dict[int, Any] = {}
    while not queue.empty():
        rank, ok, value = queue.get()
        if not ok:
            raise RuntimeError(f"rank {rank}:\n{value}")
        found[rank] = value
    if late or len(found) < size:
        raise RuntimeError(f"ranks {late or sorted(set(range(size)) - found.keys())} did not end")
    return [found[rank] for rank in range(size)]


def _process(rank: int, size: int, port: int, queue: Any, work: Callable[..., Any], arguments: Any) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    try:
        dist.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=TIMEOUT,
            device_id=device,
        )  # fmt: skip

        def exchange(x: Any) -> list[Any]:
            found: list[Any] = [None] * size
            dist.all_gather_object(found, x)
            return found

        value = work(Rank(rank, size, dist.group.WORLD, str(device), exchange, False), *arguments)
        torch.cuda.synchronize()
        dist.barrier()
        queue.put((rank, True, value))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  whatever it is, the parent raises it
        queue.put((rank, False, traceback.format_exc()))
        os._exit(1)  # the other ranks' collectives end with an error, not this one's clean-up


def in_threads(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``work(rank, *arguments)`` in ``size`` threads with a stream each on one GPU; what each returned.

    Raises RuntimeError with the traceback of the first rank that failed.
    """
    from kdacore.parallel import local_group

    group = local_group(size)
    found: list[Any] = [None] * size
    failed: list[str] = []

    def run(rank: int) -> None:
        try:
            stream = torch.cuda.Stream()
            # Autograd's own threads are one for each device: two ranks would wait for one another in it.
            with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
                found[rank] = work(
                    Rank(rank, size, group[rank], "cuda", group[rank].exchange, True), *arguments
                )
                stream.synchronize()
        except BaseException:  # noqa: BLE001  whatever it is, the caller's thread raises it
            failed.append(f"rank {rank}:\n{traceback.format_exc()}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise RuntimeError(failed[0])
    return found
