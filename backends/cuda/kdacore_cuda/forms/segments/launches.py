"""The launches of the segments form as data.

Up to four: prepare (operands of every chunk), maps (how each segment maps the state at its start
to the state at its end), chain (the state at each segment's start), and output (every segment from
its start). A sequence of one segment needs neither maps nor chain.
"""

from __future__ import annotations

from collections.abc import Iterable

from kdacore.types import Request
from kdacore_cuda.forms.choice_on_device import chosen
from kdacore_cuda.forms.chunk_numbers import CHUNK, chunk_numbers, gates_of
from kdacore_cuda.forms.launches import FORWARD_ARRAYS, Launches, arguments_of, made_once
from kdacore_cuda.forms.segments import kernels, segment_lengths
from kdacore_cuda.forms.segments.segment_lengths import chain_blocks
from kdacore_cuda.forms.segments.workspace import CHUNK_OPERANDS_BYTES, MAP_BYTES, START_BYTES
from kdacore_cuda.kernel_parameters import FLAGS, PREPARE_MARKED, SEGMENT_LENGTHS, SEGMENTS
from kdacore_cuda.runtime.device_figures import arch_of, multiprocessors_of
from kdacore_cuda.runtime.program import NOTHING, Launch, Program, Value


def launches_of(r: Request) -> Launches:
    """The launches of a call that this form serves."""
    numbers = chunk_numbers(r)
    items, multiprocessors = r.N * r.HV, multiprocessors_of(r)
    lengths = segment_lengths.lengths_of(r)
    segments = lengths.segments(numbers["NT"])
    slots = r.T // (CHUNK * lengths.first) + r.N if r.packed else r.N * segments
    units, marked_units = numbers["units"], r.checkpoint_count * r.HV
    keeps = segments > 1 and chosen(r).saves == "maps"
    per_segment = kernels.output_blocks(slots * r.HV, multiprocessors)
    from_zeros = not (r.has("initial_state") or r.pool_size)
    may_compose = from_zeros and not (r.packed or marked_units)
    composes = may_compose and kernels.output_composes(segments, per_segment)
    flags, blocks, mapped = numbers["flags"], 0, 0
    if segments > 1:
        mapped = slots if r.packed else r.N * (segments - 1)
        if not composes:
            blocks = chain_blocks(items, multiprocessors)
            if kernels.output_begins_early(blocks * items, multiprocessors):
                flags |= FLAGS["EARLY_OUTPUT"]
        elif keeps:
            flags |= FLAGS["KEEP_STARTS"]
    # The workspace: states that checkpoints inside chunks start from, operands of chunks cut off at checkpoints, of all
    # chunks, and the B of segments' maps. Behind them, or in the buffer that is saved, maps and starting states.
    stored = slots * r.HV if segments > 1 else 0
    records_at = marked_units * START_BYTES
    operands_at = records_at + marked_units * CHUNK_OPERANDS_BYTES
    addends_at = operands_at + units * CHUNK_OPERANDS_BYTES
    addends_end = addends_at + stored * START_BYTES
    maps_at = 0 if keeps else addends_end
    starts_at = maps_at + stored * MAP_BYTES
    starts_end = starts_at + stored * START_BYTES
    numbers |= lengths.parameters(segments) | {
        "segment_flags": flags,
        "records_at": records_at,
        "operands_at": operands_at,
        "addends_at": addends_at,
        "maps_at": maps_at,
        "starts_at": starts_at,
        "prepare_blocks": marked_units + units,
        "map_blocks": 2 * mapped * r.HV,
        "chain_blocks": blocks * items,
        "output_blocks": per_segment * slots * r.HV,
    }
    gates = gates_of(r)
    output = per_segment, kernels.output_is_paired(items, per_segment, composes), composes
    program = _program(numbers, *gates, marked_units > 0, segments > 1, blocks, output, keeps)
    buffers = {"workspace": addends_end if keeps else starts_end, "saved": starts_end if keeps else 0}
    return Launches(program, numbers, arch_of(r), buffers)


@made_once
def _program(
    numbers: Iterable[str],
    float_gate: bool,
    bounded: bool,
    marked: bool,
    cut: bool,
    chain: int,
    output: tuple[int, bool, bool],
    keeps: bool,
) -> Program:
    """``cut``: there are maps. ``chain``: blocks a state, 0 without. ``output``: arguments of :func:`output_kernel`."""
    prepare = kernels.prepare_marked_kernel if marked else kernels.segments_prepare_kernel
    prepared: dict[str, Value] = arguments_of(PREPARE_MARKED) if marked else {}
    prepared |= {"last": ("workspace", "records_at"), "h0": NOTHING}
    prepared |= dict.fromkeys((*SEGMENT_LENGTHS, "segments"), NOTHING)
    buffer = "saved" if keeps else "workspace"
    fields: dict[str, Value] = {
        **arguments_of(SEGMENTS),
        "flags": "segment_flags",
        "chunk_operands": ("workspace", "operands_at"),
        "addends": ("workspace", "addends_at"),
        "maps": (buffer, "maps_at"),
        "starts": (buffer, "starts_at"),
    }
    without_marks = dict.fromkeys(("mark_states", "mark_offsets", "mark_rows"), NOTHING)
    fields |= {"mark_states": "workspace"} if marked else without_marks
    steps = [Launch("prepare", prepare(float_gate, bounded), "prepare_blocks", prepared)]
    if cut:
        steps.append(Launch("maps", kernels.maps_kernel(), "map_blocks", fields))
    if chain:
        steps.append(Launch("chain", kernels.chain_kernel(chain), "chain_blocks", fields))
    steps.append(Launch("output", kernels.output_kernel(*output), "output_blocks", fields))
    return Program(steps, FORWARD_ARRAYS, tuple(numbers), one_segment=not cut)
