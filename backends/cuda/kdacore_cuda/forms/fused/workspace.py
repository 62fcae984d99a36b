"""Bytes of the fused form's workspace."""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.choice import SCANNERS, Clusters
from kdacore_cuda.kernel_parameters import OWN_START, STEP_TOKENS, TICKETS_BYTES

_SCAN_WARPS = 4
"""Warps of a scanning block of Hopper's kernel; each has flags of its own."""
_IMAGE_BYTES = 2 * 3 * 4096 + 3072 + 4 * 128 + 3 * 4 * 32
"""Of a prepared step of that kernel."""


def workspace_bytes(r: Request, clusters: Clusters) -> int:
    """For the states of sequences that two clusters share, or for the steps that others prepare; 0 without either."""
    if clusters.resident and not clusters.many_short:
        # Whether a sequence is cut in two depends on lengths and null slots, which only the device knows.
        return cut_states_bytes(clusters.resident)
    if clusters.spacing:
        return spaced_steps_bytes(r.T, r.N * r.HV, clusters.spacing)
    return prepared_steps_bytes(r.T, r.N * r.HV) if clusters.preparing else 0


def cut_states_bytes(clusters: int) -> int:
    """For tickets, for the float32 states of items cut in two, one per cluster, and for the flags (8 bytes a warp)
    behind."""
    return TICKETS_BYTES + clusters * (4 * 128 * 128 + 8 * SCANNERS * _SCAN_WARPS)


def prepared_steps_bytes(T: int, items: int) -> int:
    """For tickets, for the steps that others prepare for ``items`` sequences and heads of ``T`` tokens, and for the
    flags (8 bytes for each scanning block) that say they are there."""
    steps = -(-T // STEP_TOKENS) // (SCANNERS + 1)
    return TICKETS_BYTES + items * steps * (_IMAGE_BYTES + 8 * SCANNERS)


def spaced_steps_bytes(T: int, items: int, spacing: int) -> int:
    """The same where clusters of two prepare steps that are ``spacing`` apart, in 1/65536, and others those between:
    each with its flags in 128 bytes behind it."""
    later = max(-(-T // STEP_TOKENS) - OWN_START, 0)
    own = -(-(later << 16) // spacing)
    return TICKETS_BYTES + items * (later - own) * (_IMAGE_BYTES + 128)
