"""CUDA graphs: a captured call is replayed on other numbers, offsets and pool rows in the same memory."""

from __future__ import annotations

from dataclasses import replace

from kdacore.calls.arrays import host_values
from kdacore.calls.values import Shape
from kdacore.testing.cases import Case
from kdacore.testing.checks.accuracy import check_results
from kdacore.testing.checks.pool import check_pool
from kdacore.testing.compare import Findings, bits
from kdacore.testing.poisoned_arrays import Placed, arrays, place
from kdacore.testing.run_call import forward, watched


def graph(case: Case, findings: Findings) -> None:
    """Capture the call, then replay it as another call of the same sizes, and as itself. Of a padded pack, where
    sequences begin and how much padding follows changes between replays; of pools, the rows named and the sequences
    without a slot."""
    import torch

    placed = place(case)
    given = arrays(placed)
    with watched(case, findings):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward(case, given)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = forward(case, given)
    for replayed in (replace(case, seed=case.seed + 1, shape=other_lengths(case.shape)), case):
        _fill(placed, place(replayed))
        captured.replay()
        torch.cuda.synchronize()
        if case.pool_use is not None:
            check_pool(replayed, host_values(replayed), placed, results, findings)
        else:
            check_results(replayed, results, findings)


def other_lengths(shape: Shape) -> Shape:
    """The same sizes with other sequences: in reverse order, and where there is padding one ends earlier."""
    lengths = list(shape.lengths[::-1])
    if shape.padding and len(lengths) > 1:
        shortest = min(range(len(lengths)), key=lambda n: lengths[n] or shape.T)
        lengths[shortest] //= 2
    return replace(shape, lengths=tuple(lengths), padding=shape.T - sum(lengths) if lengths else 0)


def _fill(placed: dict[str, Placed], fresh: dict[str, Placed]) -> None:
    """Put the fresh values into the memory that was captured."""
    for name, p in placed.items():
        p.memory.copy_(fresh[name].memory)
        p.before = bits(p.memory)
