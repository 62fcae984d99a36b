"""What a chunk forward in segments keeps for its backward: the map of each segment and the state at its start.

The backward is then cut in the forward's segments and computes maps of the gradient alone. It still recomputes
everything else. Kept are 128 KiB for each segment and value head: 64 to 205 bytes a token and value head, where q, k, v
and g in bfloat16 take 1024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdacore.types import Request
from kdacore_cuda.request_encoding import items_for_choice
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.torch_arguments import aligned_bytes

if TYPE_CHECKING:
    import torch

MAP_BYTES = START_BYTES = 64 * 1024
"""Bytes of the map (A, of S' = S A + B) and of the starting state of one segment and value head."""


def keeps(r: Request, segments: int) -> bool:
    """Whether a forward in segments keeps them, given how many a sequence may have."""
    if not r.needs_grad or r.kind != "torch" or r.traced or segments < 2:
        return False
    return use_kept_segments(items_for_choice(r), multiprocessors_of(r))


def use_kept_segments(items: int, multiprocessors: int) -> bool:
    """Whether ``items`` sequences and value heads are few enough for a backward in segments whose maps are
    kept to be faster than one chain per head.

    Of what a backward in segments takes more than such a chain, the maps are most.
    """
    return 8 * items <= multiprocessors


def kept_places(count: int) -> dict[str, int]:
    """Where a backward finds what was kept of ``count`` segments times value heads, as bytes from the start of
    the buffer: ``maps`` and ``starts`` (csrc/sm90/chunk_backward/segments.cuh)."""
    return {"maps": 0, "starts": count * MAP_BYTES}


def kept_arrays(buffer: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """The same, as views of bytes. A buffer that lies off 16 bytes is copied."""
    buffer = aligned_bytes(buffer)
    return {name: buffer[at:] for name, at in kept_places(count).items()}
