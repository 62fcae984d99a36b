"""The scan of the chunk backward in segments, for few heads on Hopper: segments of a sequence are walked side by side,
in both directions.

Three launches take the place of the scan's one: maps (how each segment changes the state and its
gradient), chain (the state at each segment's start, its gradient at each end), and scan (every
segment from there). A call whose sequences have one segment needs the last alone. Where the forward
saved its maps and states of segments (:mod:`kdacore_cuda.forms.segments.workspace`), maps and chain compute
the gradient's part alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda.forms.backward import kernels
from kdacore_cuda.forms.chunk_numbers import CHUNK, flags_of
from kdacore_cuda.forms.segments import segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths, backward_segment_chunks, chain_blocks
from kdacore_cuda.kernel_parameters import FLAGS, ITEM_SIZES
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


class Walks(NamedTuple):
    """The kernels of a scan in segments. Without maps and chain no sequence has more than one segment."""

    scan: int
    """Warpgroups of a block."""
    maps: int = 0
    """Those of maps; 0: not launched."""
    chain: int = 0
    """Blocks per state; 0: not launched."""

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        """The launches with their names, in order."""
        if self.maps:
            yield "maps", kernels.segment_maps_kernel(self.maps)
            yield "chain", kernels.segment_chain_kernel(self.chain)
        yield "scan", kernels.scan_kernel(self.scan, in_segments=True)


def scan_in_segments(
    r: Request, saved: bool, multiprocessors: int
) -> tuple[Walks, dict[str, int], dict[str, int]]:
    """The launches of the scan, bytes of the arrays they need, and their numbers.

    Args:
        r: the call.
        saved: the forward's maps and states of segments are there.
        multiprocessors: of the device.
    """
    items = r.N * r.HV
    lengths = (
        segment_lengths.lengths_of(r) if saved else SegmentLengths.uniform(backward_segment_chunks(items))
    )
    segments = lengths.segments(-(-r.T // CHUNK))
    slots = r.T // (CHUNK * lengths.first) + r.N if r.packed else r.N * segments
    flags = flags_of(r) | (FLAGS["KEPT_MAPS"] if saved else 0)
    numbers = {**lengths.parameters(segments), "flags": flags}
    scan_walks = 2 * slots * r.HV
    walks = Walks(kernels.walk_warpgroups(scan_walks, multiprocessors))
    numbers["scan_blocks"] = 2 // walks.scan * scan_walks
    if segments > 1:
        mapped = (slots if r.packed else r.N * (segments - 1)) * r.HV
        maps = mapped if saved else 3 * mapped
        idle = 0 if r.packed or saved else items  # first segments have no A
        directions = 1 if saved else 2
        blocks = chain_blocks(directions * items, multiprocessors)
        walks = Walks(walks.scan, kernels.walk_warpgroups(maps - idle, multiprocessors), blocks)
        numbers |= {
            "maps_blocks": 2 // walks.maps * maps,
            "chain_blocks": directions * blocks * items,
        }
    return walks, workspace_bytes(slots * r.HV) if segments > 1 else {}, numbers
