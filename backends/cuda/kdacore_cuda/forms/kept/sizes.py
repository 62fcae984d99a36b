"""What a chunk forward keeps for its backward under ``disable_recompute``: which arrays, and where they
lie in one buffer.

Kept is what prepare and the walk forward of the scan leave in the backward's workspace. The backward
then launches neither; its gradients have the same bits.
"""

from __future__ import annotations

from kdacore_cuda.forms.backward.sizes import WORKSPACE
from kdacore_cuda.kernel_parameters import ITEM_SIZES

KEPT = ("kg", "kg_low", "qg", "w", "u", "aqk", "inv", "h", "last", "rows")
"""Arrays of :data:`kdacore_cuda.forms.backward.sizes.WORKSPACE`; u is v minus the state's
prediction, as the scan leaves it."""


def bytes_per_unit() -> int:
    """Bytes kept of a chunk of 64 tokens and one value head."""
    return sum(_bytes(name) for name in KEPT)


def _bytes(name: str) -> int:
    elements, dtype = WORKSPACE[name]
    return elements * ITEM_SIZES[dtype]


def kept_places(units: int) -> dict[str, int]:
    """Offset of each array in the buffer, in bytes, for ``units`` chunk slots times value heads. All
    are multiples of 256."""
    places, at = {}, 0
    for name in KEPT:
        places[name] = at
        at += units * _bytes(name)
    return places


def kept_bytes(units: int) -> int:
    """Bytes of the buffer."""
    return units * bytes_per_unit()
