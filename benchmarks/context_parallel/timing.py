"""What a call takes on all ranks, on one GPU alone, and what the exchange takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.context_parallel.ranks import Rank
from benchmarks.context_parallel.rows import (
    RowCase,
    call,
    output_gradients,
    slice_of,
    training_step,
    whole,
    with_gradients,
)
from kdacore.bench.clock import Budget, CudaClock, Step, Timing, interleave

PASSES = ("forward", "training")


def time_case(rank: Rank, case: RowCase, samples: int) -> dict[str, Timing]:
    """``one forward``, ``one training`` (rank 0 alone, the whole row) and the same of all ranks, ``ranks ...``."""
    x = whole(case, rank.device)
    do = output_gradients(case, x)[0]
    T = case.T // rank.size
    mine, own = slice_of(x, rank.rank, rank.size), do[:, rank.rank * T : (rank.rank + 1) * T].clone()
    found: dict[str, Timing] = {}
    if rank.rank == 0:
        clock = CudaClock()
        for name, step in _steps(case, x, do, None):
            for _ in range(2):
                step()
            found[f"one {name}"] = interleave({name: step}, clock, Budget(samples, 10.0))[name]
        del clock
    del x, do
    torch.cuda.empty_cache()
    rank.barrier()
    for name, step in _steps(case, mine, own, rank.cp):
        for _ in range(3):
            step()
        found[f"ranks {name}"] = rank.time(step, samples)
    return found


def _steps(case: RowCase, x: dict, do: torch.Tensor, cp: object) -> Iterator[tuple[str, Step]]:  # type: ignore[type-arg]
    def forward() -> None:
        with torch.no_grad():
            call(case, x, cp, final=False)

    yield "forward", forward
    yield "training", partial(training_step, case, with_gradients(x), do, cp)


def time_exchange(rank: Rank, H: int, samples: int) -> dict[str, Timing]:
    """The two collectives of a row with H value heads alone."""
    found = {}
    for name, columns in (("forward", 256), ("backward", 128)):
        x = torch.zeros(1, H, 128, columns, device=rank.device)
        gathered = x.new_empty(rank.size, H, 128, columns)

        def step(x: torch.Tensor = x, gathered: torch.Tensor = gathered) -> None:
            dist.all_gather_into_tensor(gathered, x, group=rank.cp)

        found[f"exchange {name}"] = rank.time(step, samples)
    return found
