"""Which of the compiled kernels of ``chunk_gated_delta_rule`` serve a call, by its head dims, dtype and options."""

from __future__ import annotations

from typing import NamedTuple

from kdacore.types import Request

PART_VALUES = 64
"""Value rows of a state that a warpgroup carries."""


def state_parts(r: Request) -> int:
    """Such parts of a state: 1 if heads have at most 64 channels and values, else 2."""
    return 1 if max(r.K, r.V) <= PART_VALUES else 2


class Variant(NamedTuple):
    """What kernels are compiled for, besides their blocks."""

    size: int = 128
    """Channels and values of a head in shared memory and in the workspace: 128 or 64."""
    narrow: bool = False
    """Heads have fewer channels or values: csrc/sm90/gated_delta/head_dims.cuh."""
    float16: bool = False
    """q, k, v and operands of products are float16, else bfloat16."""
    marks: bool = False
    """The walk may have checkpoints at chosen tokens: csrc/sm90/gated_delta/walk_checkpoints.cuh."""

    def blocks(self, warpgroups: int = 1) -> int:
        """Blocks that walk a sequence and value head, of so many warpgroups, which have 64 values each."""
        return self.size // (PART_VALUES * warpgroups)


WIDE = Variant()
"""K = V = 128, bfloat16."""


PACKAGED = (WIDE, Variant(64), Variant(float16=True), Variant(marks=True))
"""Those that the package has machine code for."""


def variant_of(r: Request, cut: bool) -> Variant:
    """That of the kernels of a call. ``cut``: sequences have several segments."""
    size = PART_VALUES * state_parts(r)
    found = Variant(size, min(r.K, r.V) < size, r.dtype == "float16", "checkpoint_offsets" in r.features)
    return cut_variant(found) if cut else found


def cut_variant(of: Variant) -> Variant:
    """That of kernels for segments of such calls: maps, and the launch that chains them, have states of 128."""
    return of if of.size == WIDE.size else of._replace(size=WIDE.size, narrow=True)
