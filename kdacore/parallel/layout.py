"""Where the sequences of a packed row lie on one of the ranks that hold it.

Rank r holds tokens ``[r*T, (r+1)*T)`` of the whole row. Everything is computed from the offsets on the device, so
nothing is read on the host, and in few launches: on a short slice they would show.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Layout(NamedTuple):
    """The sequences of the whole row as one rank sees them.

    Two of them matter most: the *entering* sequence, which holds the rank's first token, and the *leaving* one, which
    holds its last. Where that token is padding, some other sequence stands in its place, which does not cross.
    """

    offsets: torch.Tensor
    """``[N+1]``: offsets of the local parts, most of which may be empty, in the local rows. Their end is below T where
    the rank holds padding."""
    numbers: torch.Tensor
    """int32 ``[2]``: the entering and the leaving sequence."""
    begins: torch.Tensor
    """``[2]``: where they begin in the whole row."""
    ends: torch.Tensor
    """``[2]``: where they end in the whole row."""
    crosses: torch.Tensor
    """bool ``[2]``: the entering sequence began on an earlier rank; the leaving one goes on on the next."""

    @property
    def entering(self) -> torch.Tensor:
        """int32 ``[1]``."""
        return self.numbers[:1]

    @property
    def leaving(self) -> torch.Tensor:
        """int32 ``[1]``."""
        return self.numbers[1:]

    @property
    def enters(self) -> torch.Tensor:
        """bool ``[1]``: the entering sequence began on an earlier rank."""
        return self.crosses[:1]

    @property
    def leaves(self) -> torch.Tensor:
        """bool ``[1]``: the leaving sequence goes on on the next rank."""
        return self.crosses[1:]


def layout(cu_seqlens: torch.Tensor, rank: int, T: int) -> Layout:
    """The place of the sequences on one rank.

    Args:
        cu_seqlens: ``[N+1]`` offsets over the whole row. Its dtype must hold the length of the whole row.
        rank: of this process, from 0.
        T: tokens of each rank.
    """
    where: dict[str, Any] = {"dtype": cu_seqlens.dtype, "device": cu_seqlens.device}
    start, ends = rank * T, cu_seqlens[1:]
    borders = torch.arange(start, start + 2 * T, T, **where)
    # The number of sequences that end at or before a token is that of the sequence that holds it.
    first = torch.searchsorted(ends, borders[:1], out_int32=True, right=True)
    last = torch.searchsorted(ends, borders[1:], out_int32=True)
    numbers = torch.cat([first, last]).clamp_(max=ends.shape[0] - 1)
    begins, ends = cu_seqlens.index_select(0, numbers), ends.index_select(0, numbers)
    return Layout(
        local_offsets(cu_seqlens, rank, T), numbers, begins, ends, (begins < borders) & (ends > borders)
    )


def local_offsets(cu_seqlens: Any, rank: int, T: int) -> Any:
    """``clip(cu_seqlens - rank*T, 0, T)``: offsets of the local parts of all sequences. NumPy arrays too.

    Clipped first: a difference with offsets that are far off would not fit their dtype.
    """
    start = rank * T
    return cu_seqlens.clip(start, start + T) - start


def starts_here(cu_seqlens: torch.Tensor, rank: int, T: int) -> torch.Tensor:
    """``[N]``: sequences whose first token a rank holds. Empty sequences count as the first rank's."""
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    if rank == 0:
        return (begins < T) | (begins == ends)
    return (begins >= rank * T) & (begins < (rank + 1) * T) & (begins < ends)


def ends_here(cu_seqlens: torch.Tensor, rank: int, T: int) -> torch.Tensor:
    """``[N]``: sequences whose last token a rank holds; empty ones, again, the first rank's."""
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    if rank == 0:
        return (ends <= T) | (begins == ends)
    return (ends > rank * T) & (ends <= (rank + 1) * T) & (begins < ends)
