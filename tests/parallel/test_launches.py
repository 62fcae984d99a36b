"""What ``cp=`` launches beside the backend's functions. On a GPU each launch takes the host a few microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kdacore
from benchmarks import one_rank
from kdacore.parallel import torch_fold
from kdacore.registry import REGISTRY

NO_LAUNCH = frozenset(
    {
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "expand",
        "narrow",
        "select",
        "slice",
        "split_with_sizes",
    }
    | {"transpose", "unsqueeze", "view"}
    | {"empty", "empty_like", "new_empty", "scalar_tensor"}
)
"""Operations that only describe memory, allocate it, or make a number on the host."""


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        if name not in NO_LAUNCH:
            self.count[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def null_slices() -> Iterator[None]:
    one_rank.install()
    yield
    REGISTRY.unregister(one_rank.NAME)


@pytest.mark.parametrize(
    ("rank", "size", "forward", "backward"),
    [(0, 2, 8, 6), (1, 2, 7, 7), (0, 4, 9, 11), (1, 4, 8, 10), (2, 4, 11, 6), (3, 4, 12, 7)],
)
def test_launches_of_a_training_step(rank: int, size: int, forward: int, backward: int) -> None:
    """Of a dense call that was made before, the copy in the place of the gather among them. Forward: the marks, joined
    to what is exchanged, compared and noted; a state of zeros or what the ranks before make of it; NaN where the ranks
    are not in step. Backward: the same but the marks."""
    x = [torch.randn(1, 16, 2, 8, requires_grad=True) for _ in range(4)]
    x.append(torch.rand(1, 16, 2, requires_grad=True))
    cp = one_rank.OneRank(rank, size)

    def step() -> torch.Tensor:
        return kdacore.chunk_kda(*x, backend=one_rank.NAME, cp=cp)[0]

    for _ in range(2):
        step().backward(torch.ones(1, 16, 2, 8))
    weight = torch.ones(1, 16, 2, 8)
    with torch.autograd.set_multithreading_enabled(False):
        with Launches() as there:
            o = step()
        with Launches() as back:
            torch.autograd.grad(o, x, weight)
    assert sum(there.count.values()) <= forward, there.count
    assert sum(back.count.values()) <= backward, back.count


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_folds_of_one_slice_have_the_bits_of_more(count: int, dtype: torch.dtype) -> None:
    """One slice from zeros is its own state, and the last transition plays no part in a fold from behind."""
    torch.manual_seed(0)
    M, C = torch.randn(count, 2, 8, 8, dtype=dtype), torch.randn(count, 2, 8, 4, dtype=dtype)
    zeros, nan = torch.zeros(2, 8, 4, dtype=dtype), torch.full((1, 2, 8, 8), torch.nan, dtype=dtype)
    found = torch_fold.folded(torch.cat([nan, M[1:]]), C, None)
    torch.testing.assert_close(found, torch_fold.folded(M, C, zeros), rtol=0, atol=0)
    back = torch_fold.folded_back(M[:-1], C)
    wide = C[-1].double()
    for q in reversed(range(count - 1)):
        wide = torch.baddbmm(C[q].double(), M[q].double().mT, wide)
    torch.testing.assert_close(back, wide.to(dtype), rtol=0, atol=0)
    assert torch.equal(back, torch_fold.folded_back(torch.cat([M[:-1], nan]), C))
