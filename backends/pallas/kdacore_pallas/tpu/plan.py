"""Sizes of a chunked call for the kernels: its grid and its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kdacore.types import Request
from kdacore_pallas.tpu.sizes import CHUNK, chunk_steps


@dataclass(frozen=True)
class ChunkGrid:
    """Sizes of the grid ``(B, head blocks, NC)`` and of its blocks."""

    B: int
    T: int
    """Rows of the arrays."""
    NC: int
    """Steps of a row: its blocks, or the visits of a pack (:mod:`kdacore_pallas.tpu.schedule`)."""
    C: int
    H: int
    HV: int
    K: int
    V: int
    hb: int
    """q/k heads per grid step."""
    together: int
    """Value heads of a step that are computed side by side."""
    ragged: bool
    """Whether a block may have rows that are not tokens of the step's sequence."""
    packed: bool
    """Whether a block may be visited by several steps, each with rows of its own."""

    @property
    def R(self) -> int:
        return self.HV // self.H

    @property
    def hvb(self) -> int:
        """Value heads per grid step."""
        return self.hb * self.R

    @property
    def blocks(self) -> int:
        """Blocks of C rows, the last of which may reach beyond T."""
        return -(-self.T // self.C)


def make_chunk_grid(
    request: Request, hb: int, together: int = 1, rows_without_slot: bool = False
) -> ChunkGrid:
    """The grid of a call. ``rows_without_slot``: the tokens of some sequences may be masked."""
    T, H, HV, K, V = request.T, request.H, request.HV, request.K, request.V
    ragged = request.packed or T % CHUNK != 0 or rows_without_slot
    NC = chunk_steps(request)
    return ChunkGrid(request.B, T, NC, CHUNK, H, HV, K, V, hb, together, ragged, request.packed)
