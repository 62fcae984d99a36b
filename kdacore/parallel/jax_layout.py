"""Which part of which sequence a rank of a JAX mesh axis holds, computed on the device from the offsets of the row.

Rank r of R holds tokens ``[r*T, (r+1)*T)`` of a row of ``R*T`` tokens. :mod:`kdacore.parallel.layout` does the same in
torch for one rank whose number is known. Here one program runs on every rank: the rank's number is a tracer, the
offsets may be tracers, no shape and no branch depends on their values, and each rank computes the borders of all.

Nor can tracers be refused for their values. Where they are no offsets of the row, the row counts as one sequence, and
``Place.valid`` says that nothing computed from it is a result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

Array = Any


class Borders(NamedTuple):
    """What happens between the ranks, for all of them: each ``[R]``. Every rank computes the same."""

    leaving: Array
    """int32: the sequence that holds the rank's last token; N where no sequence does."""
    passes: Array
    """bool: one sequence holds all of the rank's tokens and the token before them."""
    continues: Array
    """bool: the sequence that holds the rank's last token holds the next one too."""


class Part(NamedTuple):
    """What one rank holds of the N sequences of a pack."""

    offsets: Array
    """``[N+1]`` int32 offsets into the rank's own tokens; many sequences are empty."""
    entering: Array
    """``[N]`` bool: the sequence that goes on here from the rank before."""
    begins: Array
    """``[N]`` bool: the rank holds the sequence's first token."""
    ends: Array
    """``[N]`` bool: the rank holds the sequence's last token."""
    first: Array
    """``[1]`` int32: the sequence that holds the rank's first token; some sequence where none does."""
    last: Array
    """``[1]`` int32: the same for its last token."""


def holder(offsets: Array, token: Array | int) -> Array:
    """The sequence that holds a token; N where none does. Empty sequences hold none."""
    return jnp.searchsorted(offsets[1:], token, side="right").astype(jnp.int32)


def borders_of_pack(cu_seqlens: Array, T: int, ranks: int) -> Borders:
    """The borders of a pack with offsets ``[N+1]`` over the whole row."""
    cu = cu_seqlens.astype(jnp.int32)
    N = cu.shape[0] - 1
    first = jnp.arange(ranks, dtype=jnp.int32) * T
    leaving = holder(cu, first + (T - 1))
    entering = holder(cu, first)
    enters = (entering < N) & (cu[entering] < first)
    return Borders(leaving, enters & (entering == leaving), jnp.append(enters[1:], False))


def borders_of_rows(ranks: int) -> Borders:
    """The borders of rows that are one sequence each, all cut alike."""
    rank = jnp.arange(ranks, dtype=jnp.int32)
    return Borders(jnp.zeros(ranks, jnp.int32), rank > 0, rank < ranks - 1)


def part_of_pack(cu_seqlens: Array, T: int, rank: Array) -> Part:
    """What rank ``rank`` (int32) holds of a pack with offsets ``[N+1]`` over the whole row."""
    cu = cu_seqlens.astype(jnp.int32)
    first, N = rank * T, cu.shape[0] - 1
    start, end = cu[:-1], cu[1:]

    def here(token: Array) -> Array:
        return (start < end) & (token >= first) & (token < first + T)

    return Part(
        jnp.clip(cu - first, 0, T),
        (start < first) & (end > first),
        here(start),
        here(end - 1),
        jnp.minimum(holder(cu, first), N - 1)[None],
        jnp.minimum(holder(cu, first + (T - 1)), N - 1)[None],
    )


class Place(NamedTuple):
    """Where a rank lies in the row."""

    rank: Array
    """int32."""
    borders: Borders
    part: Part | None
    """None for rows that are one sequence each."""
    valid: Array | None = None
    """bool: the offsets are offsets of the row; None for rows that are one sequence each."""

    def entering(self) -> Array:
        """``[N]`` (or one for all rows): the sequences that began on a rank before."""
        return self.rank > 0 if self.part is None else of_states(self.part.entering)

    def begins(self) -> Array:
        """The same: those whose first token is here."""
        return self.rank == 0 if self.part is None else of_states(self.part.begins)

    def ends(self) -> Array:
        """The same: those whose last token is here."""
        last = self.borders.passes.shape[0] - 1
        return self.rank == last if self.part is None else of_states(self.part.ends)

    def leaves(self) -> Array:
        """The same: those that go on on the next rank."""
        continues = self.borders.continues[self.rank]
        if self.part is None:
            return continues
        N = self.part.begins.shape[0]
        return of_states(continues & (jnp.arange(N, dtype=jnp.int32) == self.part.last))


def of_states(of_sequences: Array) -> Array:
    """``[N]`` so that it broadcasts against states."""
    return of_sequences[:, None, None, None]


def place_of(rank: Array, ranks: int, T: int, cu_seqlens: Array | None) -> Place:
    """Where a rank lies in a row of ``ranks * T`` tokens with these offsets; None: each row is one sequence."""
    if cu_seqlens is None:
        return Place(rank, borders_of_rows(ranks), None)
    cu, valid = row_offsets(cu_seqlens, ranks * T)
    return Place(rank, borders_of_pack(cu, T, ranks), part_of_pack(cu, T, rank), valid)


def row_offsets(cu_seqlens: Array, tokens: int) -> tuple[Array, Array]:
    """Offsets ``[N+1]`` of a row of ``tokens``, int32, and whether those given are such: from 0, never decreasing, to
    ``tokens`` at most. Where they are not, the first sequence is the whole row and the others are empty."""
    valid = (cu_seqlens[0] == 0) & jnp.all(cu_seqlens[1:] >= cu_seqlens[:-1]) & (cu_seqlens[-1] <= tokens)
    whole = jnp.where(jnp.arange(cu_seqlens.shape[0]) == 0, 0, tokens)
    return jnp.where(valid, cu_seqlens, whole).astype(jnp.int32), valid
