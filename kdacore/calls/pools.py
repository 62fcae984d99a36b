"""The ways a call may use pools of states, as data, and the index tables that exercise them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kdacore.calls.description import CallDescription


@dataclass(frozen=True)
class Pool:
    """One way of using pools."""

    indices: int = 1
    """Dimensions of ``state_indices``; 0: none, ``initial_state`` holds one state for each sequence."""
    inplace: bool = False
    read_only: bool = False
    negatives: bool = False
    """Some sequences have no slot, by negative indices."""
    strided: bool = False
    """Rows of the pools lie far apart in memory, those of each pool in its own way."""
    reads: bool = True
    """``initial_state`` is given."""
    null: bool = False
    """``null_index`` is 0; row 0 belongs to nobody, and sequences without a slot name it."""
    has_state: bool = False
    """``has_initial_state`` is given, False for some sequences."""
    writes: int = 0
    """Dimensions of ``write_indices``; 0: none."""
    separate: bool = False
    """``write_pool`` is given."""
    shared: bool = False
    """The last two of four sequences start from the rows of the first two."""
    checkpoints: bool = False
    """``checkpoint_offsets`` and ``checkpoint_indices`` are given."""
    records: bool = False
    """Records of candidates are given; some sequences have no row of them."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the public call, None for those left at their defaults."""
        return {
            "inplace_state": self.inplace or None,
            "read_only_state": self.read_only or None,
            "null_index": 0 if self.null else None,
        }

    def suits(self, family: str) -> bool:
        """Do ops of this family have all the arguments?"""
        decoding = self.indices == 2 or self.read_only or self.writes == 2 or self.records
        if family == "commit":
            return self.records and not (self.has_state or self.separate)
        if family == "decode" and not self.reads:
            return False
        return not decoding if family == "chunk" else not self.checkpoints


POOLS: dict[str, Pool] = {
    "indexed": Pool(),
    "indexed_negative": Pool(negatives=True),
    "indexed_null": Pool(null=True),
    "inplace": Pool(inplace=True),
    "inplace_negative": Pool(inplace=True, negatives=True),
    "inplace_null": Pool(inplace=True, negatives=True, null=True),
    "inplace_strided": Pool(inplace=True, negatives=True, strided=True),
    "inplace_whole": Pool(indices=0, inplace=True),
    "fresh": Pool(inplace=True, negatives=True, has_state=True),
    "fresh_whole": Pool(indices=0, has_state=True),
    "moved": Pool(inplace=True, negatives=True, null=True, has_state=True, writes=1),
    "moved_strided": Pool(inplace=True, strided=True, writes=1),
    "other_pool": Pool(inplace=True, null=True, strided=True, writes=1, separate=True),
    "other_pool_same_rows": Pool(inplace=True, negatives=True, separate=True),
    "written_only": Pool(indices=0, inplace=True, reads=False, writes=1, separate=True),
    "written_from_states": Pool(indices=0, inplace=True, null=True, has_state=True, writes=1, separate=True),
    "verify": Pool(read_only=True),
    "verify_negative": Pool(read_only=True, negatives=True),
    "verify_whole": Pool(indices=0, read_only=True),
    "accepted": Pool(indices=2),
    "accepted_inplace": Pool(indices=2, inplace=True, negatives=True),
    "accepted_strided": Pool(indices=2, inplace=True, strided=True),
    "accepted_verify": Pool(indices=2, read_only=True),
    "accepted_last": Pool(indices=2, inplace=True, null=True, writes=1),
    "candidates": Pool(inplace=True, has_state=True, writes=2),
    "candidates_moved": Pool(indices=2, inplace=True, negatives=True, null=True, writes=2),
    "candidates_other_pool": Pool(indices=2, inplace=True, strided=True, writes=2, separate=True),
    "records": Pool(inplace=True, negatives=True, records=True),
    "records_fresh": Pool(inplace=True, null=True, has_state=True, records=True),
    "records_moved": Pool(inplace=True, negatives=True, null=True, strided=True, writes=1, records=True),
    "records_other_pool": Pool(inplace=True, strided=True, writes=1, separate=True, records=True),
    "checkpoints": Pool(inplace=True, checkpoints=True),
    "checkpoints_moved": Pool(
        inplace=True, negatives=True, null=True, has_state=True, writes=1, checkpoints=True
    ),
    "checkpoints_other_pool": Pool(
        inplace=True, negatives=True, strided=True, separate=True, checkpoints=True
    ),
}
SPARE_ROWS = 3
"""Rows no sequence names; they hold NaN and must stay as they are."""
_NOWHERE = 2**30
"""The offset of a checkpoint that is not written: it may be anything."""


def checkpoints_of(N: int) -> int:
    """How many checkpoints the tables of ``N`` sequences have: two for each, and one that is not written."""
    return 2 * N + 1


def index_tables(call: CallDescription, rng: Any) -> dict[str, Any]:
    """Every index, count, offset and mask of the call's pools by argument, NumPy. Rows are permuted, and each that
    is written is named once. Which sequences have no slot, say, depends on the seed."""
    pool, N = call.pool_use, call.shape.N
    tables: dict[str, Any] = {}
    if pool is None:
        return tables
    rows = _free_rows(pool, 0, call.state_rows, rng)
    target = rows
    if pool.separate:  # without rows of its own it is written where the other is read
        target = _free_rows(pool, 0 if pool.writes else call.state_rows, call.write_rows, rng)
    if pool.indices:
        tables |= _read_tables(call, pool, rows)
    if pool.has_state:
        # In pairs, as every second sequence may have no slot.
        tables["has_initial_state"] = (np.arange(N) // 2 + call.seed) % 2 == 0
    if pool.writes:
        tables["write_indices"] = _write_table(call, pool, tables, target)
    if pool.records:
        tables |= _record_tables(call, pool, rng)
    if call.gives("conv_indices"):
        tables["conv_indices"] = _take(_free_rows(pool, 0, call.conv_rows, rng), N)
    if pool.checkpoints:
        tables |= _checkpoint_tables(call, pool, target, rng)
    return tables


def _free_rows(pool: Pool, first: int, end: int, rng: Any) -> Iterator[int]:
    """Rows of a pool from ``first`` on in random order, without the one that is no slot."""
    return (int(row) for row in first + rng.permutation(end - first) if not (pool.null and row == 0))


def _take(rows: Iterator[int], *shape: int) -> Any:
    count = int(np.prod(shape))
    return np.array([next(rows) for _ in range(count)], np.int64).reshape(shape)


def _no_slots(pool: Pool) -> list[int]:
    """Indices that name no slot."""
    return [0] * pool.null + [-1] * (pool.negatives or not pool.null)


def _read_tables(call: CallDescription, pool: Pool, rows: Iterator[int]) -> dict[str, Any]:
    N, names = call.shape.N, _no_slots(pool)
    without = range(call.seed % 2, N, 2) if pool.negatives or pool.null else range(0)
    if pool.indices == 1:
        table = _take(rows, N)
        for i, n in enumerate(without):
            table[n] = names[i % len(names)]
        if pool.shared:
            for n in range(N):
                table[n] = table[n - 2] if n % 4 > 1 else table[n]
        return {"state_indices": table}
    W = call.pool_width
    table = _take(rows, N, W)
    accepted = (np.arange(N) + call.seed) % (W + 1)
    for i, n in enumerate(without):
        if accepted[n]:  # padding, though its other rows are slots
            table[n, accepted[n] - 1] = names[i % len(names)]
        else:
            table[n, :] = names[i % len(names)]  # it starts from zeros, and writes nothing
    if pool.negatives or pool.null:
        for n in set(range(N)) - set(without):
            table[n, accepted[n] % W] = names[n % len(names)]  # one state is not written
    return {"state_indices": table, "num_accepted_tokens": accepted}


def _write_table(call: CallDescription, pool: Pool, tables: dict[str, Any], rows: Iterator[int]) -> Any:
    N, names = call.shape.N, _no_slots(pool)
    if pool.writes == 2:
        table = _take(rows, N, call.pool_width)
        for n in range(N):
            table[n, n % call.pool_width] = names[n % len(names)]
        return table
    table = _take(rows, N)
    for n in range(N):
        if n // 2 % 3 == 1:
            table[n] = names[n % len(names)]
        elif n % 3 == 0 and pool.indices and not pool.separate:  # into the row it starts from
            own = _start_row(tables, n)
            table[n] = table[n] if own < 0 or (pool.null and own == 0) else own
    return table


def _start_row(tables: dict[str, Any], n: int) -> int:
    table = tables["state_indices"]
    if table.ndim == 1:
        return int(table[n])
    accepted = int(tables["num_accepted_tokens"][n])
    return int(table[n, accepted - 1]) if accepted else -1


def _record_tables(call: CallDescription, pool: Pool, rng: Any) -> dict[str, Any]:
    """A row of records for two of three sequences, any number of which are replayed."""
    N, names = call.shape.N, _no_slots(pool)
    table = _take(_free_rows(pool, 0, call.record_rows, rng), N)
    for n in range((call.seed + 2) % 3, N, 3):
        table[n] = names[n % len(names)]
    return {"record_indices": table, "num_replayed": (np.arange(N) + call.seed) % (call.pool_width + 1)}


def _checkpoint_tables(call: CallDescription, pool: Pool, rows: Iterator[int], rng: Any) -> dict[str, Any]:
    """One checkpoint at the start or near the end of each sequence, and one in its middle; in random order."""
    lengths = call.shape.lengths or (call.shape.T,)
    offsets, indices, start = [_NOWHERE], [_no_slots(pool)[0]], 0
    for n, length in enumerate(lengths):
        last = 16 * (max(length - 1, 0) // 16)
        chosen = (0 if n % 4 == 3 else last, 16 * (last // 32))
        for i, offset in enumerate(chosen):
            wanted = length > 0 and not (i and offset == chosen[0])
            offsets.append(start + offset if wanted else _NOWHERE)
            indices.append(next(rows) if wanted else _no_slots(pool)[-1])
        start += length
    order = rng.permutation(len(offsets))
    return {
        "checkpoint_offsets": np.array(offsets, np.int64)[order],
        "checkpoint_indices": np.array(indices, np.int64)[order],
    }
