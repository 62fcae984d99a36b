"""flash-linear-attention's own context parallelism beside ours, where it is installed and the case was asked for."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial

import torch

from benchmarks.context_parallel.ranks import Rank
from benchmarks.context_parallel.rows import RowCase, output_gradients, slice_of, whole, with_gradients
from kdacore.bench import arrays as made
from kdacore.bench.clock import Timing

REQUIRED = "fla"


def installed() -> bool:
    return importlib.util.find_spec(REQUIRED) is not None


def time_case(rank: Rank, case: RowCase, samples: int) -> dict[str, Timing]:
    """``fla forward`` and ``fla training`` of all ranks; first calls of new sizes tune its kernels for minutes.

    It serves no initial and no final states, so none are asked for. Empty for the gated delta rule, whose gate its call
    takes already computed.
    """
    if case.op != "kda" or not installed():
        return {}
    x = whole(case, rank.device)
    do = output_gradients(case, x)[0]
    T = case.T // rank.size
    mine, own = slice_of(x, rank.rank, rank.size), do[:, rank.rank * T : (rank.rank + 1) * T].clone()
    del x, do
    offsets = mine.pop("cu_seqlens", None)
    if offsets is None:
        offsets = torch.tensor([0, case.T], device=rank.device)
    context = importlib.import_module("fla.ops.cp").build_cp_context(offsets, group=rank.cp)
    function = importlib.import_module("fla.ops.kda").chunk_kda
    options = made.options(case.case) | {"output_final_state": False, "cp_context": context}
    mine["dt_bias"] = mine["dt_bias"].reshape(-1)
    leaves = with_gradients(mine)
    wanted = [v for v in leaves.values() if v.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            function(**mine, **options)

    def training() -> None:
        torch.autograd.grad(function(**leaves, **options)[0], wanted, own)

    found = {}
    for name, step in (("forward", forward), ("training", training)):
        for _ in range(3):
            step()
        found[f"fla {name}"] = rank.time(partial(step), samples)
    return found
