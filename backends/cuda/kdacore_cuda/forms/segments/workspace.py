"""Arrays in the workspace of a chunk forward in segments, and what it saves for its backward: the map of each segment
and the state at its start.

With these the backward is cut in the forward's segments and computes maps of the gradient alone. It still recomputes
everything else. Saved are 128 KiB for each segment and value head: 64 to 205 bytes a token and value head, where q, k,
v and g in bfloat16 take 1024.
"""

from __future__ import annotations

CHUNK_OPERANDS_BYTES = 512 + 3 * 16384 + 8192
"""Bytes of the record that prepare writes for one chunk and value head:
csrc/sm90/chunk_forward/segments/chunk_operands.cuh."""
MAP_BYTES = START_BYTES = 64 * 1024
"""Bytes of the map (A, of S' = S A + B) and of the starting state of one segment and value head."""
