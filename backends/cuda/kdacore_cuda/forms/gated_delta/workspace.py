"""What the launches of the gated delta rule leave for one another, for each chunk and value head, and what a forward
saves of it for its backward under ``disable_recompute``."""

from __future__ import annotations

from kdacore_cuda.forms.backward.workspace import Buffer

RECORD_BYTES = 2 * 10 * 16 * 16 * 2 + 1024 + 4 * 64 * 4
"""``ChunkRecord`` of csrc/sm90/gated_delta/record.cuh."""
UNIT_ARRAYS = ("records", "u", "states", "state_grads")
"""csrc/sm90/gated_delta/backward_workspace.cuh says what they hold."""


def unit_bytes(size: int = 128) -> dict[str, int]:
    """Bytes of each array, for one chunk and value head of ``size`` channels and values."""
    state = 2 * size * size
    return {"records": RECORD_BYTES, "u": 2 * 64 * size, "states": state, "state_grads": state}


RECORD_FLAGS_BYTES = 8 * 2
"""Of the flags of one record, one for each block that walks it: ``UnitFlags`` of
csrc/sm90/chunk_forward/dataflow/flags.cuh."""
SAVED = ("records", "u", "states")
"""Arrays that a forward saves. The backward then launches neither what makes records nor the walk forward; its
gradients have the same bits."""


def places(names: tuple[str, ...], units: int, size: int, buffer: Buffer) -> dict[str, int]:
    """Adds arrays to a buffer, for ``units`` chunk slots times value heads of ``size`` channels and values. Their
    offsets in bytes, by the names of those numbers."""
    each = unit_bytes(size)
    return {f"{name}_at": buffer.add(units * each[name]) for name in names}
