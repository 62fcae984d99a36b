"""Where the sequences of a packed row lie on one of the ranks that hold it.

Rank r holds tokens ``[r*T, (r+1)*T)`` of the whole row. Everything here is computed from the offsets on the device, so
nothing is read on the host; the rank may be a number of Python's, or an array where it is traced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array


class Layout(NamedTuple):
    """The sequences of the whole row as one rank sees them. Numbers are int arrays ``[1]``, the rest bool arrays."""

    offsets: Array
    """``[N+1]``: offsets of the local parts, most of which may be empty, in the local rows. Its end is below T where
    the rank holds padding."""
    entering: Array
    """The sequence that holds the first local token; some sequence where that is padding."""
    leaving: Array
    """The sequence that holds the last local token; some sequence where that is padding."""
    enters: Array
    """``[1]``: the entering sequence began on an earlier rank."""
    leaves: Array
    """``[1]``: the leaving sequence goes on on the next rank."""
    first_rank: Array
    """The rank where the entering sequence begins."""
    last_rank: Array
    """The rank that holds the last token of the leaving sequence."""
    starts_here: Array
    """``[N]``: sequences whose first token this rank holds. Empty sequences count as the first rank's."""
    ends_here: Array
    """``[N]``: sequences whose last token this rank holds; empty ones, again, the first rank's."""


def layout(cu_seqlens: Array, rank: Any, T: int) -> Layout:
    """The place of each sequence on one rank.

    Args:
        cu_seqlens: ``[N+1]`` offsets over the whole row. Its dtype must hold the length of the whole row.
        rank: of this process, from 0.
        T: tokens of each rank.
    """
    xp = array_namespace(cu_seqlens)
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    count = int(begins.shape[0])
    start = rank * T
    offsets = local_offsets(cu_seqlens, rank, T)
    # The number of sequences that end at or before a token is the number of the one that holds it.
    entering = _numbers(xp, ends <= start, count)
    leaving = _numbers(xp, ends <= start + T - 1, count)
    filled = begins < ends
    width = max(T, 1)
    first = xp.where(filled, begins // width, xp.zeros_like(begins))
    last = xp.where(filled, (ends - 1) // width, xp.zeros_like(ends))
    enters = (begins < start) & (ends > start)
    leaves = (begins < start + T) & (ends > start + T)
    return Layout(
        offsets,
        entering,
        leaving,
        xp.any(enters, axis=0, keepdims=True),
        xp.any(leaves, axis=0, keepdims=True),
        xp.take(first, entering, axis=0),
        xp.take(last, leaving, axis=0),
        first == rank,
        last == rank,
    )


def local_offsets(cu_seqlens: Array, rank: Any, T: int) -> Array:
    """``clip(cu_seqlens - rank*T, 0, T)``: offsets of the local parts of all sequences. NumPy arrays too."""
    xp = array_namespace(cu_seqlens)
    return xp.clip(cu_seqlens - rank * T, 0, T)


def _numbers(xp: Any, before: Array, count: int) -> Array:
    """How many are true, at most ``count - 1``: int32 ``[1]``."""
    found = xp.sum(xp.astype(before, xp.int32), axis=0, keepdims=True, dtype=xp.int32)
    return xp.clip(found, 0, count - 1)
