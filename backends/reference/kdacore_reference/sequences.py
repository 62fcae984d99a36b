"""Where each sequence lies among the flattened ``[B*T]`` rows. Host integers only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kdacore.types import Request
from kdacore_reference.exact import to_offsets


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: its number in the pack or batch, its first row and how many rows it has."""

    n: int
    start: int
    length: int


def sequences_of(request: Request, inputs: Any) -> list[Sequence]:
    """Every sequence of a call, empty ones included, in order."""
    if not request.packed:
        return [Sequence(b, b * request.T, request.T) for b in range(request.B)]
    name = "cu_seqlens" if inputs.cu_seqlens_cpu is None else "cu_seqlens_cpu"
    bounds = to_offsets(request, getattr(inputs, name), name)
    return [Sequence(n, a, b - a) for n, (a, b) in enumerate(pairwise(bounds.tolist()))]
