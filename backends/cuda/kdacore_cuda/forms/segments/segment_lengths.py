"""How long the segments are that a sequence is cut into, forward and backward alike: in chunks of 64 tokens."""

from __future__ import annotations

from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda.kernel_parameters import SEGMENT_LENGTHS
from kdacore_cuda.runtime.device_figures import multiprocessors_of

_LEAST_CHUNKS, _MOST_CHUNKS, _REFERENCE_CHUNKS = 10, 43, 128
_LEAST_MIDDLE_CHUNKS, _MIDDLE_SEGMENTS, _LEAST_LONG_CHUNKS = 16, 16, 32
_LEAST_SEGMENTS_TO_GRADE, _MOST_GRADED_SEGMENTS, _SHORTER_LAST = 8, 14, 3
_SHORTER_FIRST = {3: (32, 48, 48), 5: (21, 27, 27), 6: (18, 23, 22)}
"""By how many segments 8192 tokens have, where the first one is shorter than the others: chunks in the first segment,
in the two behind it, and in the others. As measured: docs/lab/cuda-segments.md, "A shorter first segment"."""


class SegmentLengths(NamedTuple):
    """Chunks of 64 tokens in the segments of a sequence, by their place in it."""

    first: int
    """In each of the first segments."""
    first_segments: int
    """How many those are."""
    later: int
    """In each of the next segments."""
    later_segments: int
    """How many those are."""
    middle: int
    """In each of the next segments."""
    middle_segments: int
    """How many those are."""
    long: int
    """In each segment behind them."""

    @classmethod
    def uniform(cls, chunks: int) -> SegmentLengths:
        """``chunks`` in every segment."""
        return cls(chunks, 0, chunks, 0, chunks, 0, chunks)

    @classmethod
    def growing(
        cls, first: int, first_segments: int, middle: int, middle_segments: int, long: int
    ) -> SegmentLengths:
        """Lengths of which none is less than the one before (there are no later segments). Packs need this: their
        workspace has a slot for every ``first`` chunks, so shorter segments would not all find one."""
        return cls(first, first_segments, first, 0, middle, middle_segments, long)

    def of(self, index: int) -> int:
        """Chunks of segment ``index`` of a sequence that is long enough."""
        lengths = [length for length, segments in self._parts() for _ in range(segments)]
        return lengths[index] if index < len(lengths) else self.long

    def segments(self, chunks: int) -> int:
        """Segments of a sequence of ``chunks`` chunks."""
        before = 0
        for length, segments in self._parts():
            if chunks <= length * segments:
                return before - (-chunks // length)
            chunks -= length * segments
            before += segments
        return before - (-chunks // self.long)

    def parameters(self, segments: int) -> dict[str, int]:
        """The kernels' parameters, with the ``segments`` of a dense sequence."""
        return {**dict(zip(SEGMENT_LENGTHS, self, strict=True)), "segments": segments}

    def _parts(self) -> tuple[tuple[int, int], ...]:
        """Length and number of segments, but for the last ones."""
        first, first_segments, later, later_segments, middle, middle_segments, _ = self
        return (first, first_segments), (later, later_segments), (middle, middle_segments)


def lengths_behind(middle: int) -> tuple[int, int, int]:
    """``middle``, ``middle_segments`` and ``long`` of :class:`SegmentLengths`, given the first of them."""
    return middle, _MIDDLE_SEGMENTS, max(middle, _LEAST_LONG_CHUNKS)


def choose_lengths(items: int, multiprocessors: int, packed: bool) -> SegmentLengths:
    """How long segments are, for ``items`` sequences and value heads.

    Maps and output have up to two blocks for each segment and head, and with one block too many for the
    multiprocessors they take twice as long. So segments are as long as it takes for all blocks of 8192 tokens to
    run at once. Shorter ones than the least leave too many maps to chain (1600 cycles each); longer ones than the
    most leave too few blocks. The number of tokens of a call must not decide: appending tokens would then change
    the bits of those before. The place in the sequence may: behind those 8192 tokens, and again 16 segments
    later, there are blocks enough, and longer segments leave fewer maps to chain.

    Calls of fewer tokens have fewer segments, so where those are long the first one is shorter
    (:data:`_SHORTER_FIRST`): with 12 heads 2048 tokens take 11 % less time, and 8192 up to 1 % more.

    With 8 segments or more the later ones are shorter: their blocks first apply the maps of all segments before
    theirs (``forms.segments.kernels.output_composes``), and a map takes about as long as a chunk. The
    last segment of 8192 tokens gets at least three chunks less than the other later ones.
    """
    segments = max(1, multiprocessors // (2 * items))
    first = min(max(_LEAST_CHUNKS, -(-_REFERENCE_CHUNKS // segments)), _MOST_CHUNKS)
    behind = lengths_behind(max(first, _LEAST_MIDDLE_CHUNKS))
    if not packed and segments in _SHORTER_FIRST:
        first, later, middle = _SHORTER_FIRST[segments]
        return SegmentLengths(first, 1, later, 2, *lengths_behind(middle))
    if packed or segments < _LEAST_SEGMENTS_TO_GRADE:
        return SegmentLengths.growing(first, -(-_REFERENCE_CHUNKS // first), *behind)
    segments = min(segments, _MOST_GRADED_SEGMENTS)
    # Half a chunk longer than if all were equal, rounded up.
    first = -(-(2 * _REFERENCE_CHUNKS + segments) // (2 * segments))
    first_segments = 5 * segments // 7
    left, left_segments = _REFERENCE_CHUNKS - first * first_segments, segments - first_segments
    later = -(-(left + _SHORTER_LAST) // left_segments)
    return SegmentLengths(first, first_segments, later, left_segments, *behind)


def lengths_of(request: Request) -> SegmentLengths:
    """Those of a call without ranks whose forward is computed in segments."""
    return choose_lengths(request.N * request.HV, multiprocessors_of(request), request.packed)


def backward_segment_chunks(items: int) -> int:
    """Chunks in a segment of a backward for which the forward saved nothing, for ``items`` sequences and value heads.

    Longer segments leave fewer maps to make and to chain, shorter ones occupy more
    multiprocessors: at 8192 tokens, 4 heads of 16 chunks or 8 of 32 are 32 segments, which are
    walked at once in both directions, by two blocks each.
    """
    return 32 if items > 6 else 16


_SLICE_SEGMENT_CHUNKS = (128, 64, 32, 16, 8)


def slice_segment_chunks(chunks: int, heads: int, multiprocessors: int) -> int:
    """Chunks in a segment of a slice of a row: as many as leave every other multiprocessor a segment.

    Long segments leave fewer maps to apply one after another, twice in each pass and 1.2 us each; two
    blocks walk over a segment in most launches. Unlike in a call without ranks, the number of tokens may
    decide: it moves the borders of the slices anyway.

    Args:
        chunks: of the slice.
        heads: batch rows times value heads.
        multiprocessors: of the device.
    """
    fitting = (n for n in _SLICE_SEGMENT_CHUNKS if 2 * -(-chunks // n) * heads >= multiprocessors - 4)
    return next(fitting, _SLICE_SEGMENT_CHUNKS[-1])


def chain_blocks(states: int, multiprocessors: int) -> int:
    """Blocks per state of the kernels that apply the maps of segments to a state one after another, forward, backward
    and on slices of a row (csrc/sm90/chunk_forward/segments/compose.cuh). They share its value rows (same bits): 8
    where each block of so many states finds a multiprocessor of its own, else 4."""
    return 8 if 8 * states <= multiprocessors else 4
