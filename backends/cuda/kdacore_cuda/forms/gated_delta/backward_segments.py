"""The backward of ``chunk_gated_delta_rule`` with few heads: sequences are cut into segments that are walked side by
side, in both directions.

Up to three launches take the place of the walks' one. Outer: first segments are walked forward, last ones in reverse,
and maps are made of those between (how each changes the state, and its gradient). Chain: the state at each segment's
start, its gradient at each end. Inner: all but the last segments in reverse from there, all but the first ones forward.
The chain is that of ``chunk_kda``'s backward (:mod:`kdacore_cuda.forms.backward.segments`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kdacore.types import Request
from kdacore_cuda.forms.backward.kernels import segment_chain_kernel
from kdacore_cuda.forms.backward.segments import workspace_bytes
from kdacore_cuda.forms.backward.workspace import Buffer
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_numbers import CHUNK
from kdacore_cuda.forms.gated_delta.kernels import (
    inner_segments_kernel,
    outer_segments_kernel,
)
from kdacore_cuda.forms.gated_delta.segment_lengths import lengths_for
from kdacore_cuda.forms.gated_delta.segments import Cut, slots_of
from kdacore_cuda.forms.segments.segment_lengths import SegmentLengths, chain_blocks
from kdacore_cuda.gated_delta_variant import Variant
from kdacore_cuda.runtime.device_figures import multiprocessors_of
from kdacore_cuda.runtime.program import NOTHING, Launch, Value

_LEAST_FIRST = 32


def choose_lengths(items: int, multiprocessors: int) -> SegmentLengths:
    """Those for ``items`` sequences and value heads: two blocks a segment and direction.

    Two segments are walked one after the other in either direction, which gains nothing. So with room for few segments,
    2048 tokens are one.
    """
    return lengths_for(max(1, multiprocessors // (4 * items)), first=_LEAST_FIRST)


def cut_of(r: Request) -> Cut | None:
    """None where no sequence has more than one segment."""
    if not chosen(r).backward_in_segments or not r.T:
        return None
    items, multiprocessors = r.N * r.HV, multiprocessors_of(r)
    lengths = choose_lengths(items, multiprocessors)
    segments = lengths.segments(-(-r.T // CHUNK))
    if segments < 2:
        return None
    return Cut(lengths, segments, chain_blocks(2 * items, multiprocessors) if segments > 2 else 0)


def numbers_of(r: Request, cut: Cut, buffer: Buffer) -> dict[str, int]:
    """The numbers of the launches. Adds their arrays to a buffer."""
    items, slots = r.N * r.HV, slots_of(r, cut)
    mapped, inner = (slots, slots) if r.packed else (r.N * (cut.segments - 2), r.N * (cut.segments - 1))
    arrays = workspace_bytes(slots * r.HV).items()
    return cut.lengths.parameters(cut.segments) | {
        **{f"{name}_at": buffer.add(size) for name, size in arrays},
        "outer_blocks": 4 * (items + mapped * r.HV),
        "chain_blocks": 2 * cut.chain * items,
        "inner_blocks": 4 * inner * r.HV,
    }


def steps_of(walks: Mapping[str, Value], of: Variant, chain: int) -> Iterator[Launch]:
    """The launches in the place of the walks'.

    Args:
        walks: fields of the walks.
        of: the variant of the kernels.
        chain: as :attr:`Cut.chain`.
    """
    places: dict[str, Value] = {name: ("workspace", f"{name}_at") for name in ("maps", "starts", "ends")}
    yield Launch("outer", outer_segments_kernel(of), "outer_blocks", {**walks, **places})
    if chain:
        yield Launch("chain", segment_chain_kernel(chain), "chain_blocks", {**places, "h0": NOTHING})
    yield Launch("inner", inner_segments_kernel(of), "inner_blocks", {**walks, **places})
