"""What a chunk forward saves for its backward under ``disable_recompute``: which arrays, and where they
lie in one buffer.

Saved is what prepare and the walk forward of the scan leave in the backward's workspace. The backward
then launches neither; its gradients have the same bits.
"""

from __future__ import annotations

from kdacore_cuda.forms.backward.workspace import UNIT_BYTES, Buffer

SAVED = ("kg", "kg_low", "qg", "w", "u", "aqk", "inv", "h", "last", "rows")
"""Arrays of :data:`kdacore_cuda.forms.backward.workspace.WORKSPACE`; u is v minus the state's
prediction, as the scan leaves it."""


def saved_buffer(units: int) -> tuple[dict[str, int], int]:
    """Offset of each array in the buffer, in bytes, for ``units`` chunk slots times value heads, and bytes of the
    buffer."""
    buffer = Buffer()
    return {name: buffer.add(units * UNIT_BYTES[name]) for name in SAVED}, buffer.bytes
