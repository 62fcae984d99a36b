"""What the launches of a slice are, of either op: those before and those after the ranks' exchange, with the segments
that the slice is cut into, whatever the number of heads."""

from __future__ import annotations

from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda.forms.chunk_numbers import CHUNK
from kdacore_cuda.forms.launches import TOKENS, Launches
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths, chain_blocks, slice_segment_chunks
from kdacore_cuda.forms.segments.workspace import MAP_BYTES, START_BYTES
from kdacore_cuda.forms.slices.kernels import starts_kernel, transition_kernel
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.program import Launch, Value

GIVEN = (*TOKENS, "A_log", "dt_bias", "cu_seqlens")
"""The arguments that a slice's kernels take."""
BEGIN_ARRAYS = (*GIVEN, "workspace", "saved", "M", "C")
"""Arrays of the launches that begin a forward."""


class ForwardSliceLaunches(NamedTuple):
    """The launches of a slice's forward."""

    begin: Launches
    """With :data:`BEGIN_ARRAYS`. ``finish`` needs the buffers: ``workspace``, and ``saved`` with maps and starting
    states of segments, which a backward may take too."""
    finish: Launches | None
    """With ``starts``, what ``begin`` left, and results. It writes starting states to ``saved``. None where the results
    come from a whole call."""
    results: int
    """``G``: sequences whose transition is asked for."""


class BackwardSliceLaunches(NamedTuple):
    """The launches of a slice's backward. Buffers of ``begin`` are needed by what follows."""

    begin: Launches
    """With ``d_final`` and ``d_slice_start``."""
    scan: Launches | None
    """With ``ends`` and ``d_starts``. What ``gradients`` needs of all buffers is then in ``both``. None where
    ``gradients`` has these launches, too."""
    gradients: Launches
    """Those that write gradients."""
    results: int
    """``G``: sequences whose gradient at the slice's start is asked for."""


class SliceSegments(NamedTuple):
    """How a slice is cut."""

    chunks: int
    """Of each segment."""
    segments: int
    """Of a dense sequence."""
    slots: int
    """Places for segments of one value head, unused ones of a pack included."""
    results: int
    """``G``, forward and backward: rows, or one of a pack."""
    blocks: int
    """Blocks a state of the launch that composes maps to M and C."""
    start_blocks: int
    """The same of the launch that finds the state at each segment's start."""

    @classmethod
    def of(cls, r: Request) -> SliceSegments:
        """For a slice's call."""
        NT, multiprocessors, results = -(-r.T // CHUNK), multiprocessors_of(r), 1 if r.packed else r.B
        chunks = slice_segment_chunks(NT, r.B * r.HV, multiprocessors)
        segments = -(-NT // chunks)
        slots = r.T // (CHUNK * chunks) + r.N if r.packed else r.N * segments
        blocks = chain_blocks(2 * results * r.HV, multiprocessors), chain_blocks(r.N * r.HV, multiprocessors)
        return cls(chunks, segments, slots, results, *blocks)

    def lengths(self) -> dict[str, int]:
        """The kernels' parameters."""
        return SegmentLengths.uniform(self.chunks).parameters(self.segments)

    def numbers(self, r: Request) -> dict[str, int]:
        """The numbers that the launches of a forward take of it."""
        return self.lengths() | {
            "transition_blocks": 2 * self.results * r.HV * self.blocks,
            "start_blocks": self.start_blocks * r.N * r.HV,
        }

    @property
    def forward_kernels(self) -> tuple[int, int]:
        """What decides which kernels compose maps: blocks a state in ``begin``, and in ``finish``, 0 where there is one
        segment."""
        return self.blocks, self.start_blocks if self.segments > 1 else 0


def saved_places(segments: int) -> tuple[dict[str, int], int]:
    """Where ``saved`` has the maps and starting states of so many segments times value heads, and its bytes."""
    return {"maps_at": 0, "starts_at": segments * MAP_BYTES}, segments * (MAP_BYTES + START_BYTES)


SEGMENT_FIELDS: dict[str, Value] = {
    "addends": ("workspace", "addends_at"),
    "maps": ("saved", "maps_at"),
    "starts": ("saved", "starts_at"),
}
"""Where a forward's launches find the maps of segments and the states at their starts."""


def transition_step(blocks: int) -> Launch:
    """The last launch of ``begin``."""
    composed = {name: SEGMENT_FIELDS[name] for name in ("addends", "maps")}
    return Launch("transition", transition_kernel(blocks), "transition_blocks", composed)


def starts_step(blocks: int) -> list[Launch]:
    """The first launch of ``finish``; none where there is one segment."""
    fields = SEGMENT_FIELDS | {"h0": "starts"}
    return [Launch("starts", starts_kernel(blocks), "start_blocks", fields)] if blocks else []
