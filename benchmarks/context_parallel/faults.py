"""What happens where ranks fail: one is killed in the middle of a call, or their calls are not the same."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.context_parallel.rows import RowCase, call, slice_of, whole
from kdacore.errors import ContractError

TIMEOUT = 10.0
"""Seconds, of the process group."""
GRACE = 150.0
"""Seconds more that a process may take to start, to notice and to end. NCCL's watchdog reports the collective at the
timeout, and writes a dump before it ends the process."""


def try_all(size: int) -> Iterator[str]:
    """Try every fault on ``size`` GPUs. A line for each.

    Raises AssertionError where a rank does not end as it should.
    """
    for name, fault in (("other shapes", _other_shapes), ("a rank killed", _killed)):
        yield _try(name, size, fault)


def _try(name: str, size: int, fault: Callable[..., Any]) -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, size, port, queue, fault)) for rank in range(size)]
    for p in processes:
        p.start()
    end = time.time() + TIMEOUT + GRACE
    ended: dict[int, float] = {}
    while len(ended) < size and time.time() < end:
        time.sleep(0.05)
        for rank, p in enumerate(processes):
            if not p.is_alive():
                ended.setdefault(rank, time.time())
    hung = [rank for rank, p in enumerate(processes) if p.is_alive()]
    for p in processes:
        if p.is_alive():
            p.kill()
        p.join()
    said: dict[int, str] = {}
    began = 0.0
    while not queue.empty():
        rank, what, at = queue.get()
        if what == "begins":
            began = max(began, at)
        else:
            said[rank] = what
    codes = [p.exitcode for p in processes]
    if hung:
        raise AssertionError(f"{name}: ranks {hung} did not end; exit codes {codes}, {said}")
    if "returned" in said.values() or not began:
        raise AssertionError(f"{name}: a rank returned results, or none began; {said}")
    seconds = {rank: round(at - began, 1) for rank, at in sorted(ended.items())}
    return f"{name} (timeout {TIMEOUT:.0f} s): ended after {seconds} s, exit codes {codes}, {said}"


def _rank(rank: int, size: int, port: int, queue: Any, fault: Callable[..., Any]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    case = RowCase("kda", 2048 * size, 4)
    x = slice_of(whole(case, f"cuda:{rank}"), rank, size)
    queue.put((rank, "begins", time.time()))
    try:
        fault(rank, size, case, x)
        torch.cuda.synchronize()
        queue.put((rank, "returned", time.time()))
    except Exception as error:  # noqa: BLE001  which one is what is asked
        queue.put((rank, f"{type(error).__name__}: {str(error)[:150]}", time.time()))
    os._exit(0 if fault is _other_shapes else 1)  # no clean-up that waits for a rank that is gone


def _killed(rank: int, size: int, case: RowCase, x: dict[str, Any]) -> None:
    with torch.no_grad():
        call(case, x, dist.group.WORLD)
        torch.cuda.synchronize()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        call(case, x, dist.group.WORLD)


def _other_shapes(rank: int, size: int, case: RowCase, x: dict[str, Any]) -> None:
    if rank == size - 1:
        x = {n: v[:, :1024].contiguous() if n in ("q", "k", "v", "g", "beta") else v for n, v in x.items()}
    with torch.no_grad():
        try:
            call(case, x, dist.group.WORLD)
        except ContractError as error:
            if error.argument != "q":
                raise AssertionError(f"{error.argument} is named") from error
            raise
