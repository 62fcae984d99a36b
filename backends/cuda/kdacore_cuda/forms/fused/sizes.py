"""Sizes of the fused form: its grid, and its workspace in float32 numbers."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.choice import SCANNERS, Clusters
from kdacore_cuda.kernel_parameters import STEP_TOKENS, TICKETS_BYTES

SCAN_WARPS = 4
"""Warps of a scanning block of Hopper's kernel; each has flags of its own."""
IMAGE_BYTES = 2 * 3 * 4096 + 3072 + 4 * 128 + 3 * 4 * 32
"""Of a prepared step of that kernel."""


def grid_blocks(clusters: Clusters, items: int) -> int:
    """Blocks, for so many sequences times value heads."""
    return (clusters.preparing + (clusters.resident or items)) * clusters.size


def workspace_size(r: Request, clusters: Clusters) -> int:
    """Float32 numbers for the states of sequences that two clusters share, or for the steps that others prepare; 0
    without either."""
    if clusters.resident and not clusters.many_short:
        # Whether a sequence is cut in two depends on lengths and null slots, which only the device knows.
        return cut_states_size(clusters.resident)
    return prepared_steps_size(r.T, r.N * r.HV) if clusters.preparing else 0


def cut_states_size(clusters: int) -> int:
    """Float32 numbers for tickets, for the states of items cut in two, one per cluster, and for the
    flags (8 bytes a warp) behind."""
    return TICKETS_BYTES // 4 + clusters * (128 * 128 + 2 * SCANNERS * SCAN_WARPS)


def prepared_steps_size(T: int, items: int) -> int:
    """Float32 numbers for tickets, for the steps that others prepare for ``items`` sequences and heads of ``T``
    tokens, and for the flags (8 bytes for each scanning block) that say they are there."""
    steps = -(-T // STEP_TOKENS) // (SCANNERS + 1)
    return TICKETS_BYTES // 4 + items * steps * (IMAGE_BYTES // 4 + 2 * SCANNERS)
