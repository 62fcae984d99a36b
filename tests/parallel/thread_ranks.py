"""Ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kdacore.parallel import local_group


def on_threads(size: int, work: Callable[[Any], Any], timeout: float = 60.0) -> list[Any]:
    """What ``work(ranks)`` returns on each of so many ranks. Raises what the first that failed raised."""

    def run(ranks: Any) -> Any:
        done = False
        try:
            # On a GPU the backwards of two ranks would otherwise wait for each other in one thread.
            with torch.autograd.set_multithreading_enabled(False):
                found = work(ranks)
            done = True
            return found
        finally:
            if not done:
                ranks.leave()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, ranks) for ranks in local_group(size, timeout)]
        errors = [future.exception() for future in futures]
    for error in sorted([e for e in errors if e is not None], key=lambda e: "another rank" in str(e)):
        raise error
    return [future.result() for future in futures]
