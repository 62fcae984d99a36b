"""Where the sequences of a pack lie on each rank, against a count of every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kdacore.parallel.layout import layout, local_offsets


def counted(offsets: Any, rank: int, T: int) -> dict[str, Any]:
    """The same facts from a list of every token's sequence."""
    N = len(offsets) - 1
    holder = [next((n for n in range(N) if offsets[n] <= t < offsets[n + 1]), None) for t in range(8 * T)]
    mine = holder[rank * T : (rank + 1) * T]
    first, last = mine[0], mine[-1]
    ranks_of = {n: [t // T for t, m in enumerate(holder) if m == n] or [0] for n in range(N)}
    return {
        "lengths": [mine.count(n) for n in range(N)],
        "entering": first,
        "leaving": last,
        "enters": first is not None and ranks_of[first][0] < rank,
        "leaves": last is not None and ranks_of[last][-1] > rank,
        "first_rank": None if first is None else ranks_of[first][0],
        "last_rank": None if last is None else ranks_of[last][-1],
        "starts_here": [ranks_of[n][0] == rank for n in range(N)],
        "ends_here": [ranks_of[n][-1] == rank for n in range(N)],
    }


PACKS = (
    (0, 40),
    (0, 8, 16, 40),
    (0, 0, 1, 9, 9, 33, 34, 34),
    (0, 5, 11),
    (0, 0, 0),
    (0, 16, 16, 16, 17, 32),
)


@pytest.mark.parametrize("pack", PACKS, ids=str)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_every_rank(pack: tuple[int, ...], dtype: str) -> None:
    T = 8
    for rank in range(5):
        found = layout(torch.tensor(pack, dtype=getattr(torch, dtype)), rank, T)
        wanted = counted(pack, rank, T)
        assert np.diff(found.offsets.numpy()).tolist() == wanted["lengths"]
        assert 0 <= int(found.offsets[0]) <= int(found.offsets[-1]) <= T
        for name in ("enters", "leaves", "starts_here", "ends_here"):
            assert getattr(found, name).tolist() == np.atleast_1d(wanted[name]).tolist(), (rank, name)
        for name, rank_name in (("entering", "first_rank"), ("leaving", "last_rank")):
            number = getattr(found, name)
            assert number.shape == (1,) and 0 <= int(number) < len(pack) - 1
            if wanted[name] is not None:  # else padding: any sequence
                assert int(number) == wanted[name]
                assert int(getattr(found, rank_name)) == wanted[rank_name]


def test_offsets_in_any_library() -> None:
    offsets = [0, 3, 9, 20]
    for array in (np.array(offsets), torch.tensor(offsets)):
        assert local_offsets(array, 1, 8).tolist() == [0, 0, 1, 8]


def test_rows_of_no_token() -> None:
    found = layout(torch.tensor([0, 0, 0]), 1, 0)
    assert found.ends_here.tolist() == found.starts_here.tolist() == [False, False]
    assert not found.enters and not found.leaves
