"""``chunk_gated_delta_rule`` with few heads: sequences are cut into segments that are walked side by side.

Up to three launches take the place of the walk's one: the first segments are walked from the initial states, while
maps of the later ones are made (how each changes the state at its start); chain finds the state at each later segment's
start; and the later segments are walked from there. Maps and chain are those of ``chunk_kda`` in segments
(:mod:`kdacore_cuda.forms.segments`). Where sequences have few segments, the blocks that walk them do the chain's part
(:func:`kdacore_cuda.choice.composes_starts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kdacore.types import Request
from kdacore_cuda.choice import composes_starts, shorter_segments
from kdacore_cuda.forms.backward.workspace import Buffer
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_numbers import CHUNK, flags_of
from kdacore_cuda.forms.gated_delta.kernels import (
    first_segments_kernel,
    later_segments_kernel,
)
from kdacore_cuda.forms.gated_delta.segment_lengths import SHORTER_SEGMENTS, lengths_for
from kdacore_cuda.forms.launches import arguments_of
from kdacore_cuda.forms.segments.kernels import chain_kernel, output_begins_early
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths, chain_blocks
from kdacore_cuda.forms.segments.workspace import MAP_BYTES, START_BYTES
from kdacore_cuda.gated_delta_variant import Variant
from kdacore_cuda.kernel_parameters import FLAGS, SEGMENTS
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.program import NOTHING, Launch, Value


def choose_lengths(items: int, multiprocessors: int, shorter: bool = False) -> SegmentLengths:
    """Those for ``items`` sequences and value heads: two blocks a segment. ``shorter``: the first ones are shorter.

    The first segment is walked while maps of the later ones are made, so calls of two segments have neither maps nor a
    chain, and take as long as one walk over both, and a launch more.
    """
    room = max(1, multiprocessors // (2 * items))
    return lengths_for(room, 1, SHORTER_SEGMENTS) if shorter else lengths_for(room, 1)


LEAST_SEGMENTS = 3
"""Of the longest sequence of a call that is cut."""


class Cut(NamedTuple):
    """How the sequences of a call are cut."""

    lengths: SegmentLengths
    segments: int
    """Of a dense sequence; the most that one of a pack can have."""
    chain: int
    """Blocks a state of the launch that chains maps, 0 without one."""


def cut_of(r: Request) -> Cut | None:
    """None where no sequence has more than two segments, which have neither maps nor a chain: one walk over both has
    the same bits and takes less time."""
    if not chosen(r).cut or not r.T:
        return None
    items, multiprocessors = r.N * r.HV, multiprocessors_of(r)
    lengths = choose_lengths(items, multiprocessors, shorter_segments(r))
    segments = lengths.segments(-(-r.T // CHUNK))
    if segments < LEAST_SEGMENTS:
        return None
    composes = composes_starts(r, segments)
    return Cut(lengths, segments, 0 if composes else chain_blocks(items, multiprocessors))


def slots_of(r: Request, cut: Cut) -> int:
    """Places for segments of one value head, unused ones of a pack included."""
    return r.T // (CHUNK * cut.lengths.first) + r.N if r.packed else r.N * cut.segments


def numbers_of(r: Request, cut: Cut, buffer: Buffer) -> dict[str, int]:
    """The numbers of the launches. Adds their arrays to a buffer."""
    items, slots = r.N * r.HV, slots_of(r, cut)
    mapped, later = (slots, slots) if r.packed else (r.N * (cut.segments - 2), r.N * (cut.segments - 1))
    stored = slots * r.HV
    arrays = {"maps": MAP_BYTES, "addends": START_BYTES} | ({"starts": START_BYTES} if cut.chain else {})
    flags = FLAGS["EARLY_OUTPUT"] * output_begins_early(cut.chain * items, multiprocessors_of(r))
    return cut.lengths.parameters(cut.segments) | {
        **{f"{name}_at": buffer.add(stored * size) for name, size in arrays.items()},
        "first_blocks": 2 * (items + mapped * r.HV),
        "chain_blocks": cut.chain * items,
        "chain_flags": flags_of(r) | flags,
        "later_blocks": 2 * later * r.HV,
    }


def steps_of(records: Mapping[str, Value], of: Variant, chain: int) -> Iterator[Launch]:
    """The launches behind that of the records.

    Args:
        records: fields of the walks.
        of: the variant of the kernels.
        chain: as :attr:`Cut.chain`.
    """
    arrays = ("maps", "addends", "starts") if chain else ("maps", "addends")
    places: dict[str, Value] = {name: ("workspace", f"{name}_at") for name in arrays}
    walks = {**records, **places}
    yield Launch("first", first_segments_kernel(of, composes=not chain), "first_blocks", walks)
    if not chain:
        yield Launch("later", later_segments_kernel(of, composes=True), "later_blocks", walks)
        return
    # Without an initial state it begins with the addend of the first segment, which ends there.
    fields: dict[str, Value] = {**arguments_of(SEGMENTS), **places, "flags": "chain_flags"}
    fields |= dict.fromkeys(("h0", "ht", "mark_offsets", "mark_rows"), NOTHING)
    yield Launch("chain", chain_kernel(chain), "chain_blocks", fields)
    yield Launch("later", later_segments_kernel(of), "later_blocks", walks)
