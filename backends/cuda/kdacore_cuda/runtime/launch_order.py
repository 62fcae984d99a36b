"""Which launch must come right before one that reads device memory before it waits.

From compute capability 9.0 a launch may begin before the one ahead of it in the stream has ended
(:mod:`kdacore_cuda.runtime.kernel`). All kernels wait for it before they read or write anything, except those of
:data:`AHEAD`: they read at once what was there before the launch ahead let them begin. That holds behind the launches
named there, which have waited themselves, and behind no others: a kernel of another library may let the next launch
begin before it has waited or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

AHEAD: Mapping[str, frozenset[str]] = {
    "maps": frozenset({"prepare", "prepare_marked"}),
    "output": frozenset({"maps", "chain", "slice_starts"}),
    "walk": frozenset({"prepare_units"}),
    "walk_later_segments": frozenset({"walk_first_segments", "chain", "slice_starts"}),
    "walk_records_beside": frozenset({"chunk_records_beside"}),
    "walk_inner_segments": frozenset({"walk_outer_segments", "segment_chain", "slice_chain"}),
}
"""Entry of a kernel that reads before it waits -> entries of those that may be launched right before it."""
WAIT_WITH_ONE_SEGMENT = frozenset({"output", "walk_later_segments"})
"""Of those, the ones that wait first where sequences have one segment."""
OTHER_WORK = ""
"""In the place of an entry: a step of a program that launches no kernel of ours."""


def check_order(entries: Iterable[str], *, one_segment: bool = False) -> None:
    """Raise ValueError unless every launch that reads before it waits comes right behind one that it may follow.

    Args:
        entries: of a program's launches, in order, without those of 0 blocks. What is ahead of the first is unknown.
        one_segment: sequences have no more than one segment.
    """
    before = OTHER_WORK
    for entry in entries:
        allowed = AHEAD.get(entry)
        waits = one_segment and entry in WAIT_WITH_ONE_SEGMENT
        if allowed is not None and before not in allowed and not waits:
            raise ValueError(
                f"{entry} reads memory before it waits: expected {' or '.join(sorted(allowed))} right before it, "
                f"got {before or 'no launch of this program'}"
            )
        before = entry
