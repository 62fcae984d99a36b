"""Arrays of the chunk backward's workspace, and which of them a forward saves for it under ``disable_recompute``."""

from __future__ import annotations

from kdacore_cuda.kernel_parameters import ITEM_SIZES

WORKSPACE: dict[str, tuple[int, str]] = {
    **dict.fromkeys(("kg", "kg_low", "qg", "w", "u", "dr"), (64 * 128, "bfloat16")),
    **dict.fromkeys(("aqk", "inv"), (64 * 64, "bfloat16")),
    **dict.fromkeys(("h", "dh"), (128 * 128, "bfloat16")),
    "last": (3 * 128, "float32"),
    "rows": (3 * 64, "float32"),
}
"""Elements and dtype of each array of the workspace, for one chunk and value head. The kernels'
workspace header under csrc/sm90 says what they hold."""

UNIT_BYTES = {name: elements * ITEM_SIZES[dtype] for name, (elements, dtype) in WORKSPACE.items()}
"""Bytes of each array, for one chunk and value head."""

OF_VALUES = frozenset({"u", "h", "dh", "dr"})
"""Those of which there is one for each block of 128 values (csrc/sm90/head_dims.cuh)."""


def unit_bytes(value_blocks: int = 1) -> dict[str, int]:
    """Bytes of each array, for one chunk and value head of so many blocks."""
    return {name: size * (value_blocks if name in OF_VALUES else 1) for name, size in UNIT_BYTES.items()}


READ_BY_SCAN_ONLY = frozenset({"kg", "kg_low", "qg", "w", "aqk", "inv"})
"""Those that the gradients kernel does not read."""


class Buffer:
    """Arrays one after another, each at a multiple of 256 bytes from the buffer's start.

    Args:
        size: bytes of what is there already, a multiple of 256.
    """

    def __init__(self, size: int = 0) -> None:
        self.bytes = size

    def add(self, size: int) -> int:
        """The offset of an array of ``size`` bytes."""
        at, self.bytes = self.bytes, self.bytes - (-size // 256) * 256
        return at


SAVED = ("kg", "kg_low", "qg", "w", "u", "aqk", "inv", "h", "last", "rows")
"""What prepare and the walk forward of the scan leave, which the form saving_forward saves: the backward then launches
neither, and its gradients have the same bits. u is v minus the state's prediction, as the scan leaves it."""


def saved_buffer(units: int, value_blocks: int = 1) -> tuple[dict[str, int], int]:
    """Offset of each array in the buffer that is saved, in bytes, for ``units`` chunk slots times value heads, and
    bytes of the buffer."""
    buffer, sizes = Buffer(), unit_bytes(value_blocks)
    return {name: buffer.add(units * sizes[name]) for name in SAVED}, buffer.bytes
