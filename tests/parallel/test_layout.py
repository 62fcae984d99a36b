"""Where the sequences of a pack lie on each rank, against a count of every token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kdacore.parallel.layout import ends_here, layout, local_offsets, starts_here


def counted(offsets: Any, rank: int, T: int) -> dict[str, Any]:
    """The same facts from a list of every token's sequence."""
    N = len(offsets) - 1
    holder = [next((n for n in range(N) if offsets[n] <= t < offsets[n + 1]), None) for t in range(8 * T)]
    mine = holder[rank * T : (rank + 1) * T]
    first, last = mine[0], mine[-1]
    ranks_of = {n: [t // T for t, m in enumerate(holder) if m == n] or [0] for n in range(N)}
    edge = {n: (offsets[n], offsets[n + 1]) for n in range(N)}
    return {
        "lengths": [mine.count(n) for n in range(N)],
        "entering": first,
        "leaving": last,
        "enters": first is not None and ranks_of[first][0] < rank,
        "leaves": last is not None and ranks_of[last][-1] > rank,
        "edges": [edge.get(first), edge.get(last)],
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
        offsets = torch.tensor(pack, dtype=getattr(torch, dtype))
        found = layout(offsets, rank, T)
        wanted = counted(pack, rank, T)
        assert np.diff(found.offsets.numpy()).tolist() == wanted["lengths"]
        assert 0 <= int(found.offsets[0]) <= int(found.offsets[-1]) <= T
        for name in ("enters", "leaves"):
            assert getattr(found, name).tolist() == [wanted[name]], (rank, name)
        assert starts_here(offsets, rank, T).tolist() == wanted["starts_here"], rank
        assert ends_here(offsets, rank, T).tolist() == wanted["ends_here"], rank
        for i, name in enumerate(("entering", "leaving")):
            number = getattr(found, name)
            assert number.shape == (1,) and number.dtype is torch.int32 and 0 <= int(number) < len(pack) - 1
            if wanted[name] is not None:  # else padding: any sequence
                assert int(number) == wanted[name]
                assert (int(found.begins[i]), int(found.ends[i])) == wanted["edges"][i]


def test_offsets_in_any_library() -> None:
    offsets = [0, 3, 9, 20]
    for array in (np.array(offsets), torch.tensor(offsets)):
        assert local_offsets(array, 1, 8).tolist() == [0, 0, 1, 8]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_offsets_far_off_do_not_wrap(kind: str) -> None:
    """They are clipped before anything is subtracted."""
    offsets: Any = np.array([0, 2**63 - 1, -5, -(2**63), 30])
    if kind == "torch":
        offsets = torch.tensor(offsets)
    assert local_offsets(offsets, 0, 8).tolist() == [0, 8, 0, 0, 8]
    assert local_offsets(offsets, 3, 8).tolist() == [0, 8, 0, 0, 6]
