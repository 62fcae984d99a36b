"""How long the segments are that sequences of the gated delta rule are cut into, in chunks of 64 tokens."""

from __future__ import annotations

from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths

_REFERENCE_CHUNKS, _SHORT_CHUNKS = 128, 32
_LEAST_LATER, _LEAST_LONG = 10, 24
_SHORT_SEGMENTS, _ROOM_FOR_SHORT = 3, 8
SHORTER_SEGMENTS = 5
"""Of 2048 tokens, where a map between two of them costs less than a chunk."""


def lengths_for(later: int, first: int, short_segments: int = _SHORT_SEGMENTS) -> SegmentLengths:
    """As long as it takes for the blocks of 8192 tokens to run at once in each launch that walks segments.

    Shorter ones leave more maps to chain, each for most of the time of a chunk. Behind 8192 tokens there are blocks
    enough, and segments are longer. The tokens of a call must not decide, as in
    :func:`kdacore_cuda.forms.segments.segment_lengths.choose_lengths`. But 2048 tokens are to take no longer in
    segments than in one: with room for many the first three have 11 chunks, so that such a call is three; with room for
    fewer the first one may be longer than the others. More than three short ones have the room of three: two of them
    one after another take as long as a longer one beside them, whose blocks begin first.

    Args:
        later: segments behind the first whose blocks find room.
        first: chunks of the first segment, at least, where these are fewer than eight.
        short_segments: segments that 2048 tokens have where they are as many or more.
    """
    if later >= _ROOM_FOR_SHORT:
        short, least = (-(-_SHORT_CHUNKS // n) for n in (short_segments, _SHORT_SEGMENTS))
        left = _REFERENCE_CHUNKS - short_segments * short
        rest = max(least, -(-left // (later + 1 - _SHORT_SEGMENTS)))
        long = max(rest, _LEAST_LONG)
        return SegmentLengths.growing(short, short_segments, rest, -(-left // rest), long)
    first = max(first, -(-_REFERENCE_CHUNKS // (later + 1)))
    rest = max(_LEAST_LATER, -(-(_REFERENCE_CHUNKS - first) // later))
    count = -(-(_REFERENCE_CHUNKS - first) // rest)
    # No segment has the length that is named first, by which packs have places in memory: the least.
    return SegmentLengths(rest, 0, first, 1, rest, count, max(rest, _LEAST_LONG))
