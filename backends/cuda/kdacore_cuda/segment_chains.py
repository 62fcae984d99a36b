"""Blocks of the kernels that apply the maps of segments to a state one after another, forward, backward
and on slices of a row (csrc/sm90/chunk_forward/segments/compose.cuh)."""

from __future__ import annotations

CHAIN_THREADS = 256
"""Threads of a block."""


def chain_blocks(states: int, multiprocessors: int) -> int:
    """Blocks per state, which share its value rows (same bits), for so many states: 8 where each finds
    a multiprocessor of its own, else 4."""
    return 8 if 8 * states <= multiprocessors else 4


def chain_shared(blocks: int) -> int:
    """Shared memory of a block in bytes: three maps of 64 KB, its value rows, barriers."""
    return 3 * 64 * 1024 + 128 * 1024 // blocks + 24
