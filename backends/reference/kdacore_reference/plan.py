"""How a call is cut: chunks of 32 tokens, slabs of chunks that are worked on together, units that are independent.

Slabs keep temporaries small whatever ``T`` is. Every matrix product has the fixed shapes of one chunk (the last chunk
of a sequence is padded with tokens that change nothing), so no bit of a result depends on how many tokens follow, on
what else is in the batch, or on how the slabs fall.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kdacore.types import Request
from kdacore_reference.exact import I64
from kdacore_reference.sequences import Sequence

CHUNK = 32


@dataclass(frozen=True, slots=True)
class Slab:
    """Some consecutive chunks of every sequence of a unit. Blocks are ordered by chunk, then by sequence."""

    counts: list[int]
    """At each chunk, how many of the unit's sequences still run: always the first ones."""
    first_chunk: int
    rows: I64 | slice
    """Row in the flattened ``[B*T]`` axis of each of the ``blocks * CHUNK`` tokens; padding repeats a real row."""
    real: I64 | None
    """Which of those tokens are not padding; None when all are real."""
    slots: I64 | slice
    """Number of each block among all chunks of the call, as a slice where they follow one another."""
    blocks: int

    def slots_of(self, blocks: slice) -> I64 | slice:
        """``slots`` of the blocks of one step."""
        if isinstance(self.slots, slice):
            return slice(self.slots.start + blocks.start, self.slots.start + blocks.stop)
        return self.slots[blocks]

    @property
    def steps(self) -> Iterator[tuple[int, slice]]:
        """``(chunk, blocks)`` of each step of the serial scan."""
        offset = 0
        for i, n in enumerate(self.counts):
            yield self.first_chunk + i, slice(offset, offset + n)
            offset += n


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences and heads that are scanned in lock step, independently of every other unit."""

    number: int
    sequences: list[Sequence]
    """Longest first."""
    heads: slice
    """Query/key heads."""
    value_heads: slice
    slabs: list[Slab]

    @property
    def size(self) -> int:
        """Chunks times value heads."""
        heads: int = self.value_heads.stop - self.value_heads.start
        return heads * sum(slab.blocks for slab in self.slabs)


def chunk_count(sequence: Sequence) -> int:
    return -(-sequence.length // CHUNK)


def plan_units(request: Request, sequences: list[Sequence], blocks: int) -> list[Unit]:
    """Cuts a call so that a slab holds about ``blocks`` chunks, counting one per value head."""
    group = request.HV // request.H
    by_length = sorted(sequences, key=lambda s: -s.length)
    if request.kind == "jax" or request.device.type != "cpu":
        # One shape whatever the lengths and the batch: JAX compiles for every shape it meets, and an accelerator's
        # library may choose another algorithm, with other bits, for another number of products.
        heads, together, blocks = request.H, 1, 1
    else:
        heads = max(1, min(8 // group, request.H))
        together = max(1, blocks // (heads * group))
        if heads == request.H:
            together = min(together, max(1, -(-len(by_length) // 2)))
    slots = np.concatenate([[0], np.cumsum([chunk_count(s) for s in sequences])])
    first_slot = {s.n: int(slots[i]) for i, s in enumerate(sequences)}
    units: list[Unit] = []
    for i in range(0, len(by_length), together):
        members = by_length[i : i + together]
        depth = max(1, blocks // (len(members) * heads * group))
        slabs = list(_slabs(members, first_slot, depth))
        for h in range(0, request.H, heads):
            end = min(h + heads, request.H)
            units.append(Unit(len(units), members, slice(h, end), slice(h * group, end * group), slabs))
    return units


def _slabs(members: list[Sequence], first_slot: dict[int, int], depth: int) -> Iterator[Slab]:
    for first, end in _spans(chunk_count(members[0]), depth):
        counts, starts, lengths, slots = [], [], [], []
        for chunk in range(first, end):
            running = [s for s in members if chunk_count(s) > chunk]
            counts.append(len(running))
            starts += [s.start + chunk * CHUNK for s in running]
            lengths += [min(CHUNK, s.length - chunk * CHUNK) for s in running]
            slots += [first_slot[s.n] + chunk for s in running]
        rows, real = _token_rows(np.asarray(starts), np.asarray(lengths))
        yield Slab(counts, first, rows, real, _consecutive(np.asarray(slots)), len(slots))


def _spans(count: int, depth: int) -> Iterator[tuple[int, int]]:
    """``depth`` chunks at a time; half as many first and last, when threads wait for one another."""
    first = 0
    while first < count:
        left = count - first
        end = first + min(left, depth if first > 0 and left > depth else -(-depth // 2))
        yield first, end
        first = end


def _token_rows(starts: I64, lengths: I64) -> tuple[I64 | slice, I64 | None]:
    """Rows of every token of the blocks, as a slice where they follow one another, and the real ones if any is not."""
    offset = np.arange(CHUNK)
    rows = (starts[:, None] + np.minimum(offset, lengths[:, None] - 1)).reshape(-1)
    if (lengths < CHUNK).any():
        return rows, np.flatnonzero((offset < lengths[:, None]).reshape(-1))
    return _consecutive(rows), None


def _consecutive(numbers: I64) -> I64 | slice:
    """``numbers`` as a slice where they follow one another, which spares a copy."""
    if (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[0]) + numbers.size)
    return numbers
