"""Host side of the scan of the chunk backward in segments, for few heads on Hopper: segments of a
sequence are walked side by side, in both directions.

Three launches take the place of the scan's one: maps (how each segment changes the state and its
gradient), chain (the state at each segment's start, its gradient at each end), and scan (every
segment from there). A call whose sequences have one segment needs the last alone. Where the forward
kept its maps and states of segments (:mod:`kdacore_cuda.forms.segments.saved`), maps and chain compute
the gradient's part alone. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kdacore.lazy import lazy_module
from kdacore.types import Request
from kdacore_cuda.forms.backward.kernels import ChunkBackwardKernel
from kdacore_cuda.forms.backward.segments_kernels import (
    chunks_per_segment,
    segment_chain_kernel,
    segment_maps_kernel,
    segment_scan_kernel,
    walk_warpgroups,
)
from kdacore_cuda.forms.segments import sizes as segment_lengths
from kdacore_cuda.forms.segments.sizes import SegmentLengths, chain_blocks
from kdacore_cuda.kernel_parameters import FLAGS, ITEM_SIZES
from kdacore_cuda.request_encoding import chunk_flags
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.plan_cache import PlanCache

if TYPE_CHECKING:
    import torch
else:  # plans are made for JAX too, where torch need not be installed
    torch = lazy_module("torch")

CHUNK = 64
STATE = 128 * 128
WORKSPACE: dict[str, tuple[int, str]] = {
    "maps": (2 * STATE, "bfloat16"),
    "starts": (STATE, "float32"),
    "ends": (STATE, "float32"),
}
"""Elements and dtype of each array, for one segment and value head. The header
csrc/sm90/chunk_backward/segments.cuh says what they hold."""


class ScanLaunch(NamedTuple):
    """One launch of the scan."""

    name: str
    kernel: ChunkBackwardKernel
    blocks: int


class ChunkBackwardSegmentsPlan(NamedTuple):
    """What the request alone determines."""

    launches: tuple[ScanLaunch, ...]
    """To be made in order, between prepare and gradients. All take
    :data:`kdacore_cuda.kernel_parameters.CHUNK_BACKWARD`, with the same values."""
    stored_segments: int
    """Segments of one value head in the workspace; 0 if no sequence can have more than one."""
    sizes: dict[str, int]
    """The parameters that say how sequences are cut, and flags."""


def _make_plan(r: Request, kept: bool = False) -> ChunkBackwardSegmentsPlan:
    """``kept``: the forward's maps and states of segments are there."""
    items, multiprocessors = r.N * r.HV, multiprocessors_of(r)
    lengths = segment_lengths.lengths_of(r) if kept else SegmentLengths.uniform(chunks_per_segment(items))
    segments = lengths.segments(-(-r.T // CHUNK))
    slots = r.T // (CHUNK * lengths.first) + r.N if r.packed else r.N * segments
    launches = []
    if segments > 1:
        mapped = (slots if r.packed else r.N * (segments - 1)) * r.HV
        walks = mapped if kept else 3 * mapped
        idle = 0 if r.packed or kept else items  # first segments have no A
        warpgroups = walk_warpgroups(walks - idle, multiprocessors)
        launches.append(ScanLaunch("maps", segment_maps_kernel(warpgroups), 2 // warpgroups * walks))
        directions = 1 if kept else 2
        blocks = chain_blocks(directions * items, multiprocessors)
        launches.append(ScanLaunch("chain", segment_chain_kernel(blocks), directions * blocks * items))
    walks = 2 * slots * r.HV
    warpgroups = walk_warpgroups(walks, multiprocessors)
    launches.append(ScanLaunch("scan", segment_scan_kernel(warpgroups), 2 // warpgroups * walks))
    return ChunkBackwardSegmentsPlan(
        launches=tuple(launches),
        stored_segments=slots if segments > 1 else 0,
        sizes={
            **lengths.parameters(segments),
            "flags": chunk_flags(r) | (FLAGS["KEPT_MAPS"] if kept else 0),
        },
    )


plan_of = PlanCache(_make_plan)
plan_of_kept = PlanCache(partial(_make_plan, kept=True))
"""The same where the forward's maps and states of segments are there."""


def workspace_bytes(plan: ChunkBackwardSegmentsPlan, HV: int) -> dict[str, int]:
    """Bytes of each array of :func:`make_workspace`."""
    if not plan.stored_segments:
        return {}
    return {
        name: plan.stored_segments * HV * size * ITEM_SIZES[dtype]
        for name, (size, dtype) in WORKSPACE.items()
    }


def make_workspace(
    plan: ChunkBackwardSegmentsPlan, HV: int, like: torch.Tensor, at_hand: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Uninitialised arrays of :data:`WORKSPACE` ``[segments, HV, elements]`` on ``like``'s device, but those
    ``at_hand``; none if no sequence can have more than one segment."""
    if not plan.stored_segments:
        return {}
    lead = plan.stored_segments, HV
    return {
        name: like.new_empty((*lead, size), dtype=getattr(torch, dtype))
        for name, (size, dtype) in WORKSPACE.items()
        if name not in at_hand
    }
