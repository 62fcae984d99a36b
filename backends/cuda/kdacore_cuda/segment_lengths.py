"""How long the segments are that a sequence is cut into, forward and backward alike: in chunks of 64 tokens."""

from __future__ import annotations

from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda.kernel_parameters import SEGMENT_LENGTHS
from kdacore_cuda.multiprocessors import multiprocessors_of

_LEAST_CHUNKS, _MOST_CHUNKS, _REFERENCE_CHUNKS = 10, 43, 128
_LEAST_MIDDLE_CHUNKS, _MIDDLE_SEGMENTS, _LEAST_LONG_CHUNKS = 16, 16, 32


class SegmentLengths(NamedTuple):
    """Chunks of 64 tokens in the segments of a sequence, which may be longer further behind."""

    short: int
    """In each of the first segments."""
    short_segments: int
    """How many those are."""
    middle: int
    """In each of the next segments; not less than ``short``."""
    middle_segments: int
    """How many those are."""
    long: int
    """In each segment behind them; not less than ``middle``."""

    @classmethod
    def uniform(cls, chunks: int) -> SegmentLengths:
        """``chunks`` in every segment."""
        return cls(chunks, 0, chunks, 0, chunks)

    def of(self, index: int) -> int:
        """Chunks of segment ``index`` of a sequence that is long enough."""
        if index < self.short_segments:
            return self.short
        return self.middle if index < self.short_segments + self.middle_segments else self.long

    def segments(self, chunks: int) -> int:
        """Segments of a sequence of ``chunks`` chunks."""
        behind = chunks - self.short * self.short_segments
        if behind <= 0:
            return -(-chunks // self.short)
        beyond = behind - self.middle * self.middle_segments
        if beyond <= 0:
            return self.short_segments - (-behind // self.middle)
        return self.short_segments + self.middle_segments - (-beyond // self.long)

    def parameters(self, segments: int) -> dict[str, int]:
        """The kernels' parameters, with the ``segments`` of a dense sequence."""
        return {**dict(zip(SEGMENT_LENGTHS, self, strict=True)), "segments": segments}


def choose_lengths(items: int, multiprocessors: int) -> SegmentLengths:
    """How long segments are, for ``items`` sequences and value heads.

    Maps and output have up to two blocks for each segment and head, and with one block too many for the
    multiprocessors they take twice as long. So segments are as long as it takes for all blocks of 8192 tokens to
    run at once. Shorter ones than the least leave too many maps to chain (1600 cycles each); longer ones than the
    most leave too few blocks. The number of tokens of a call must not decide: appending tokens would then change
    the bits of those before. The place in the sequence may: behind those 8192 tokens, and again 16 segments
    later, there are blocks enough, and longer segments leave fewer maps to chain.
    """
    segments = max(1, multiprocessors // (2 * items))
    short = min(max(_LEAST_CHUNKS, -(-_REFERENCE_CHUNKS // segments)), _MOST_CHUNKS)
    middle = max(short, _LEAST_MIDDLE_CHUNKS)
    long = max(middle, _LEAST_LONG_CHUNKS)
    return SegmentLengths(short, -(-_REFERENCE_CHUNKS // short), middle, _MIDDLE_SEGMENTS, long)


def lengths_of(request: Request) -> SegmentLengths:
    """Those of a call without ranks whose forward is computed in segments."""
    return choose_lengths(request.N * request.HV, multiprocessors_of(request))
