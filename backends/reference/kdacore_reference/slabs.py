"""How the work of a chunked call is divided and run.

A sequence is divided into chunks of 32 tokens. A slab holds consecutive chunks of some sequences,
which are computed together; a unit is the slabs of some sequences and heads, and is independent of
every other unit. Slabs keep temporaries small whatever ``T`` is.

Every matrix product has the fixed shapes of one chunk (the last chunk of a sequence is padded with
tokens that change nothing), so no bit of a result depends on how many tokens follow, on what else
is in the batch, or on the slabs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import is_numpy_array

from kdacore.types import Array, ArrayKind, Request
from kdacore_reference.arrays import (
    bundled_openblas,
    cast,
    device_of,
    is_jax,
    namespace,
    plain,
    put,
    single_threaded_blas,
    store,
    unit_stride,
)

if TYPE_CHECKING:
    from kdacore.oracle.host_values import I64
    from kdacore_reference.slab_threads import Work

CHUNK = 32
WORTH_THREADS = 64
"""Work, in chunks times value heads, from which starting threads is worth its cost."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: its number in the pack or batch, its first row in the flattened ``[B*T]`` axis,
    its length."""

    n: int
    start: int
    length: int


def sequences_of(request: Request, inputs: Any) -> list[Sequence]:
    """Every sequence of a call, empty ones included, in order."""
    if not request.packed:
        return [Sequence(b, b * request.T, request.T) for b in range(request.B)]
    name = "cu_seqlens" if inputs.cu_seqlens_cpu is None else "cu_seqlens_cpu"
    from kdacore.oracle.host_values import to_offsets  # here: packed calls alone need it

    bounds = to_offsets(request, getattr(inputs, name), name)
    return [Sequence(n, a, b - a) for n, (a, b) in enumerate(pairwise(bounds.tolist()))]


def last_row(request: Request, sequences: list[Sequence]) -> int:
    """Rows of the flattened ``[B*T]`` axis that belong to a sequence: all, or the first ones of a
    padded pack."""
    return sequences[-1].start + sequences[-1].length if request.packed else request.B * request.T


@dataclass(frozen=True, slots=True)
class Slab:
    """Some consecutive chunks of every sequence of a unit. Blocks are ordered by chunk, then by
    sequence."""

    counts: list[int]
    """Number of the unit's sequences that have tokens left at each chunk: always the first ones."""
    first_chunk: int
    rows: I64 | slice
    """Row in the flattened ``[B*T]`` axis of each of the ``blocks * CHUNK`` tokens; padding repeats
    a real row."""
    real: I64 | None
    """Which of those tokens are not padding; None when all are real."""
    slots: I64 | slice
    """Number of each block among all chunks of the call, as a slice if they are consecutive."""
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
    """Sequences and heads that are scanned in step, independently of every other unit."""

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
    """Divide a call so that a slab holds about ``blocks`` chunks, counting one per value head."""
    group = request.HV // request.H
    by_length = sorted(sequences, key=lambda s: -s.length)
    if request.kind == "jax" or request.device.type != "cpu":
        # The same shapes whatever the lengths and the batch: JAX compiles for each shape, and an
        # accelerator's library may choose another algorithm, with other bits, for another number of
        # products.
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
    """Ranges of ``depth`` chunks; half as many first and last, while threads wait for one another."""
    first = 0
    while first < count:
        left = count - first
        end = first + min(left, depth if first > 0 and left > depth else -(-depth // 2))
        yield first, end
        first = end


def _token_rows(starts: I64, lengths: I64) -> tuple[I64 | slice, I64 | None]:
    """Rows of every token of the blocks, as a slice if they are consecutive; and which are real,
    None if all are."""
    offset = np.arange(CHUNK)
    rows = (starts[:, None] + np.minimum(offset, lengths[:, None] - 1)).reshape(-1)
    if (lengths < CHUNK).any():
        return rows, np.flatnonzero((offset < lengths[:, None]).reshape(-1))
    return _consecutive(rows), None


def _consecutive(numbers: I64) -> I64 | slice:
    """``numbers`` as a slice if they are consecutive, which avoids a copy."""
    if (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[0]) + numbers.size)
    return numbers


def flat_rows(array: Array) -> Array:
    """``[B, T, ...]`` as ``[B*T, ...]``, the last axis dense."""
    array = unit_stride(plain(array))
    return namespace(array).reshape(array, (-1, *array.shape[2:]))


def gather(flat: Array, slab: Slab, heads: slice, dtype: Any, mask: Array | None = None) -> Array:
    """``[rows, heads, X]`` to ``[n, heads, C, X]``, perhaps a view; with ``mask``, padding becomes
    0."""
    xp = namespace(flat)
    part = flat[:, heads, ...][index(slab.rows, flat), ...]
    part = xp.reshape(part, (slab.blocks, CHUNK, *part.shape[1:]))
    return masked(xp.permute_dims(cast(part, dtype), (0, 2, 1, 3)), mask)


def scatter_sum(target: Array, slab: Slab, heads: slice, x: Array, y: Array) -> Array:
    """:func:`scatter` of ``x + y``; overwrites ``x``."""
    rows = slab.rows
    if isinstance(rows, slice) and not is_jax(target) and target.dtype == x.dtype:
        xp = namespace(x)
        n, _, C, _ = x.shape
        view = xp.reshape(target[rows, ...], (n, C, *target.shape[1:]))[:, :, heads, ...]
        store(xp.permute_dims(view, (0, 2, 1, 3)), ..., xp.add, x, y)
        return target
    x += y
    return scatter(target, slab, heads, x)


def scatter(target: Array, slab: Slab, heads: slice, values: Array) -> Array:
    """Writes ``values`` ``[n, heads, C, X]`` to the rows and heads of ``target``
    ``[rows, heads, X]``."""
    xp = namespace(values)
    by_block = cast(xp.permute_dims(values, (0, 2, 1, 3)), target.dtype)
    rows = slab.rows
    if isinstance(rows, slice) and not is_jax(target):
        view = xp.reshape(target[rows, ...], (*by_block.shape[:2], *target.shape[1:]))
        view[:, :, heads, ...] = by_block
        return target
    by_row = xp.reshape(by_block, (-1, *by_block.shape[2:]))
    if slab.real is not None and not isinstance(rows, slice):
        rows, by_row = rows[slab.real], by_row[index(slab.real, values), ...]
    return put(target, (index(rows, values), heads), by_row)


def index(numbers: Any, like: Array) -> Any:
    """Rows as something ``like`` can be indexed with: a slice stays one."""
    if isinstance(numbers, slice) or is_numpy_array(like):
        return numbers
    return namespace(like).asarray(numbers, device=device_of(like))


def result_rows(request: Request, like: Array, heads: int, width: int, gaps: list[slice]) -> Array:
    """``[B*T, heads, width]`` for a result, with the device and dtype of ``like``: zero in the
    ``gaps``, empty in all other rows."""
    shape = (request.B * request.T, heads, width)
    rows = namespace(like).empty(shape, dtype=like.dtype, device=device_of(like))
    return zero_rows(rows, gaps)


def gaps_between(request: Request, sequences: list[Sequence]) -> list[slice]:
    """Rows of the flattened ``[B*T]`` axis that belong to none of these sequences."""
    gaps, row = [], 0
    for s in sequences:
        if s.length and s.start > row:
            gaps.append(slice(row, s.start))
        row = s.start + s.length if s.length else row
    end = request.B * request.T
    return [*gaps, slice(row, end)] if row < end else gaps


def zero_rows(rows: Array, gaps: list[slice]) -> Array:
    """``rows`` with zeros in the ``gaps``, written in place where the array kind allows it."""
    for gap in gaps:
        rows = put(rows, gap, 0)
    return rows


def write_output(inputs: Any, o: Array, rows: int) -> Array:
    """``o`` ``[B, T, HV, V]`` in the dtype of the tokens; in ``out``, where it is given, its first
    ``rows`` rows."""
    if inputs.out is None:
        return cast(o, plain(inputs[0]).dtype)
    memory = plain(inputs.out)
    here = (slice(None), slice(rows)) if o.shape[0] == 1 else ...  # only a pack has rows of no sequence
    memory[here] = cast(o[here], memory.dtype)
    return inputs.out


def mask_of(slab: Slab, like: Array) -> Array | None:
    """True at real tokens, ``[n, 1, C, 1]``; None when there is no padding."""
    if slab.real is None:
        return None
    xp = namespace(like)
    flags = [False] * (slab.blocks * CHUNK)
    for i in slab.real.tolist():
        flags[i] = True
    return xp.reshape(xp.asarray(flags, device=device_of(like)), (slab.blocks, 1, CHUNK, 1))


def masked(array: Array, mask: Array | None) -> Array:
    if mask is None:
        return array
    xp = namespace(array)
    return xp.where(mask, array, xp.zeros_like(array))


def run_units(kind: ArrayKind, work: Work[Unit, Slab], units: list[Unit]) -> None:
    """Run ``work`` for every unit. An exception in any thread is raised here.

    The BLAS has one thread with and without threads here, so that no bit depends on that choice.
    torch and JAX have their own threads and run slab after slab.
    """
    blas = bundled_openblas() if kind == "numpy" else None
    if blas is None:
        _one_by_one(work, units)
        return
    with single_threaded_blas.hold(blas) as threads:
        if threads < 2 or sum(unit.size for unit in units) < WORTH_THREADS:
            _one_by_one(work, units)
            return
        from kdacore_reference.slab_threads import run_on_threads

        run_on_threads(work, units, threads)


def _one_by_one(work: Work[Unit, Slab], units: list[Unit]) -> None:
    for unit in units:
        carried = work.begin(unit)
        for slab in work.slabs(unit):
            scanned, carried = work.scan(unit, slab, work.prepare(unit, slab), carried)
            work.finish(unit, slab, scanned)
        work.end(unit, carried)
