"""What a chunk forward in segments keeps for its backward: the map of each segment and the state at its start.

The backward is then cut in the forward's segments and computes maps of the gradient alone. It still recomputes
everything else. Kept are 128 KiB for each segment and value head: 64 to 205 bytes a token and value head, where q, k, v
and g in bfloat16 take 1024.
"""

from __future__ import annotations

MAP_BYTES = START_BYTES = 64 * 1024
"""Bytes of the map (A, of S' = S A + B) and of the starting state of one segment and value head."""


def kept_places(count: int) -> dict[str, int]:
    """Where a backward finds what was kept of ``count`` segments times value heads, as bytes from the start of
    the buffer: ``maps`` and ``starts`` (csrc/sm90/chunk_backward/segments.cuh)."""
    return {"maps": 0, "starts": count * MAP_BYTES}
