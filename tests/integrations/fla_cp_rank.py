"""One of several processes that share rows over gloo, by flash-linear-attention's functions with ``cp_context``.

``python fla_cp_rank.py <rank> <size> <folder>``: ``test_fla_context_parallel.py`` starts one for each rank. A rank that
fails ends with its traceback.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import fla_cp_calls
import torch
import torch.distributed as dist


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    fla_cp_calls.integration()
    for function in fla_cp_calls.MODULES:
        for i, lengths in enumerate(fla_cp_calls.LENGTHS):
            mine = fla_cp_calls.run_rank(function, lengths, dist.group.WORLD, rank, size, on_host=i % 2 == 0)
            shares: list[Any] = [None] * size
            dist.all_gather_object(shares, mine)
            if rank == 0:
                fla_cp_calls.check(function, lengths, shares)
    dist.barrier()
    (folder / f"{rank}.passed").touch()
    os._exit(0)  # taking a group down may end the process with an error when another rank is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
