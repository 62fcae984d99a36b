"""The ways a decoding call may use a pool of states, as data, and the index tables that exercise them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kdacore.calls.description import CallDescription


@dataclass(frozen=True)
class Pool:
    """One way of using the pool."""

    indices: int = 1
    """Dimensions of ``state_indices``; 0: none, ``initial_state`` holds one state for each sequence."""
    inplace: bool = False
    read_only: bool = False
    negatives: bool = False
    """Some sequences have no slot."""
    strided: bool = False
    """Rows of the pool lie far apart in memory."""


POOLS: dict[str, Pool] = {
    "indexed": Pool(),
    "indexed_negative": Pool(negatives=True),
    "inplace": Pool(inplace=True),
    "inplace_negative": Pool(inplace=True, negatives=True),
    "inplace_strided": Pool(inplace=True, negatives=True, strided=True),
    "inplace_whole": Pool(indices=0, inplace=True),
    "verify": Pool(read_only=True),
    "verify_negative": Pool(read_only=True, negatives=True),
    "verify_whole": Pool(indices=0, read_only=True),
    "accepted": Pool(indices=2),
    "accepted_inplace": Pool(indices=2, inplace=True, negatives=True),
    "accepted_strided": Pool(indices=2, inplace=True, strided=True),
    "accepted_verify": Pool(indices=2, read_only=True),
}
SPARE_ROWS = 3
"""Rows no sequence names; they hold NaN and must stay as they are."""


def index_tables(call: CallDescription, rng: Any) -> dict[str, Any]:
    """``state_indices`` and ``num_accepted_tokens``: permuted, each row named once, NumPy int64."""
    pool, N = POOLS[call.pool], call.shape.N
    if pool.indices == 0:
        return {}
    order = rng.permutation(call.state_rows)
    if pool.indices == 1:
        table = order[:N].copy()
        if pool.negatives:
            table[:: 2 if N > 1 else 1] = -1
        return {"state_indices": table}
    width = call.pool_width
    table = order[: N * width].reshape(N, width).copy()
    accepted = np.arange(N) % (width + 1)
    if pool.negatives:
        table[0, :] = -1
        table[-1, -1] = -1
    return {"state_indices": table, "num_accepted_tokens": accepted}


def named_rows(call: CallDescription, tables: dict[str, Any]) -> Any:
    """Rows of the pool that some sequence names (read or written), sorted."""
    if not tables:
        return np.arange(call.shape.N)
    table = tables["state_indices"]
    return np.unique(table[table >= 0])
