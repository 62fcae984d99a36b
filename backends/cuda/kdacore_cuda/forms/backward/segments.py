"""The scan of the chunk backward in segments, for few heads on Hopper: segments of a sequence are walked side by side,
in both directions.

Three launches take the place of the scan's one: maps (how each segment changes the state and its
gradient), chain (the state at each segment's start, its gradient at each end), and scan (every
segment from there). A call whose sequences have one segment needs the last alone. Where the forward
saved its maps and states of segments (:mod:`kdacore_cuda.forms.segments.workspace`), maps and chain compute
the gradient's part alone.
"""

from __future__ import annotations

from kdacore.types import Request
from kdacore_cuda.forms.backward.kernels import (
    scan_kernel,
    segment_chain_kernel,
    segment_maps_kernel,
    walk_warpgroups,
)
from kdacore_cuda.forms.chunk_numbers import CHUNK
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths, backward_segment_chunks, chain_blocks
from kdacore_cuda.kernel_parameters import FLAGS, ITEM_SIZES
from kdacore_cuda.request_encoding import chunk_flags
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.kernel import Kernel

STATE = 128 * 128
WORKSPACE: dict[str, tuple[int, str]] = {
    "maps": (2 * STATE, "bfloat16"),
    "starts": (STATE, "float32"),
    "ends": (STATE, "float32"),
}
"""Elements and dtype of each array, for one segment and value head. The header
csrc/sm90/chunk_backward/segments.cuh says what they hold."""


def workspace_bytes(segments: int) -> dict[str, int]:
    """Bytes of each array, for so many segments times value heads."""
    return {name: segments * size * ITEM_SIZES[dtype] for name, (size, dtype) in WORKSPACE.items()}


def scan_in_segments(
    r: Request, saved: bool
) -> tuple[list[tuple[str, Kernel]], dict[str, int], dict[str, float]]:
    """The launches of the scan, bytes of the arrays they need, and their numbers.

    Args:
        r: the call.
        saved: the forward's maps and states of segments are there.
    """
    items, multiprocessors = r.N * r.HV, multiprocessors_of(r)
    lengths = (
        segment_lengths.lengths_of(r) if saved else SegmentLengths.uniform(backward_segment_chunks(items))
    )
    segments = lengths.segments(-(-r.T // CHUNK))
    slots = r.T // (CHUNK * lengths.first) + r.N if r.packed else r.N * segments
    flags = chunk_flags(r) | (FLAGS["KEPT_MAPS"] if saved else 0)
    numbers: dict[str, float] = {**lengths.parameters(segments), "flags": flags}
    launches = []
    if segments > 1:
        mapped = (slots if r.packed else r.N * (segments - 1)) * r.HV
        walks = mapped if saved else 3 * mapped
        idle = 0 if r.packed or saved else items  # first segments have no A
        warpgroups = walk_warpgroups(walks - idle, multiprocessors)
        launches.append(("maps", segment_maps_kernel(warpgroups)))
        numbers["maps_blocks"] = 2 // warpgroups * walks
        directions = 1 if saved else 2
        blocks = chain_blocks(directions * items, multiprocessors)
        launches.append(("chain", segment_chain_kernel(blocks)))
        numbers["chain_blocks"] = directions * blocks * items
    walks = 2 * slots * r.HV
    warpgroups = walk_warpgroups(walks, multiprocessors)
    launches.append(("scan", scan_kernel(warpgroups, in_segments=True)))
    numbers["scan_blocks"] = 2 // warpgroups * walks
    return launches, workspace_bytes(slots * r.HV) if segments > 1 else {}, numbers
