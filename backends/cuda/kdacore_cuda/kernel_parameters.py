"""Kernel parameters, declared once: the C struct the kernel reads and the packing the host does come from one list.

Every kernel takes one struct by value. :meth:`ParamStruct.header` is compiled into the kernel; with the eight-byte
fields first there is no padding between fields, and a static assertion on the size holds the two sides together.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

FieldType = Literal["ptr", "i64", "i32", "f32"]

_C_NAMES: dict[str, str] = {"ptr": "unsigned long long", "i64": "long long", "i32": "int", "f32": "float"}
_FORMATS: dict[str, str] = {"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"}
_SIZES: dict[str, int] = {"ptr": 8, "i64": 8, "i32": 4, "f32": 4}


@dataclass(frozen=True)
class ParamStruct:
    """A by-value kernel parameter. Eight-byte fields come first, so the C layout has no holes."""

    name: str
    fields: tuple[tuple[str, FieldType], ...]
    parts: tuple[ParamStruct, ...] = ()
    """Structs one after the other, whose fields these are; the C struct inherits from them."""
    packer: struct.Struct = field(init=False, repr=False, compare=False)
    offsets: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [_SIZES[kind] for _, kind in self.fields]
        if sizes != sorted(sizes, reverse=True):
            raise ValueError(f"{self.name}: 8-byte fields must come before 4-byte fields")
        offset, offsets = 0, {}
        for (name, _), size in zip(self.fields, sizes, strict=True):
            offsets[name] = offset
            offset += size
        padding = f"{-offset % 8}x"
        formats = "".join(_FORMATS[kind] for _, kind in self.fields)
        object.__setattr__(self, "packer", struct.Struct("<" + formats + padding))
        object.__setattr__(self, "offsets", offsets)

    @property
    def size(self) -> int:
        """Bytes, a multiple of 8 as in C."""
        return self.packer.size

    def last(self, *values: float) -> dict[str, float]:
        """These values for the last fields, by name."""
        return dict(zip((name for name, _ in self.fields[-len(values) :]), values, strict=True))

    def header(self) -> str:
        """C++ text: the struct, and an assertion that the compiler laid it out as :attr:`packer` packs it."""
        if self.parts:
            lines = [f"struct {self.name} : {', '.join(part.name for part in self.parts)} {{}};"]
        else:
            fields = (f"  {_C_NAMES[kind]} {name};" for name, kind in self.fields)
            lines = [f"struct {self.name} {{", *fields, "};"]
        lines.append(f'static_assert(sizeof({self.name}) == {self.size}, "{self.name} size");')
        return "\n".join(lines) + "\n"


def _strided(*names: str) -> tuple[tuple[str, FieldType], ...]:
    """Batch, token and head strides in elements, for each named array."""
    return tuple((f"{name}_{axis}", "i64") for name in names for axis in ("sb", "st", "sh"))


V_STRIDES = slice(6, 9)
"""Where those of v are among the strides of q, k, v, g and beta."""

_INPUTS: tuple[tuple[str, FieldType], ...] = tuple(
    (name, "ptr") for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "o")
)

_STATE_ROWS: tuple[tuple[str, FieldType], ...] = tuple(
    (name, "ptr") for name in ("reads", "has_initial", "writes")
)
_STATE_STRIDES: tuple[tuple[str, FieldType], ...] = (("h0_row", "i64"), ("ht_row", "i64"))
"""Which rows of pools are read and written: csrc/common/state_rows.cuh."""
_MARKS: tuple[tuple[str, FieldType], ...] = tuple(
    (name, "ptr") for name in ("mark_offsets", "mark_rows", "mark_states")
)
"""Checkpoints at chosen tokens: csrc/common/chunk_forward/marks.cuh."""

SEGMENT_LENGTHS = (
    *("segment", "first_segments", "later_segment", "later_segments"),
    *("middle_segment", "middle_segments", "long_segment"),
)
_SEGMENTS: tuple[tuple[str, FieldType], ...] = tuple((name, "i32") for name in (*SEGMENT_LENGTHS, "segments"))
"""How a sequence is cut into segments: csrc/sm90/chunk_forward/segments/segment.cuh."""

CHUNK_FORWARD = ParamStruct(
    "ChunkForwardParams",
    (
        *_INPUTS,
        ("h0", "ptr"),
        ("ht", "ptr"),
        ("ckpt", "ptr"),
        ("workspace", "ptr"),
        *_STATE_ROWS,
        *_MARKS,
        ("launch", "i64"),
        *_STATE_STRIDES,
        *_strided("q", "k", "v", "g", "beta"),
        ("T", "i64"),
        ("N", "i32"),
        ("H", "i32"),
        ("HV", "i32"),
        ("clusters", "i32"),
        ("ckpt_every", "i32"),
        ("null_index", "i32"),
        ("marks", "i32"),
        ("gate", "i32"),
        ("flags", "i32"),
        ("beta_type", "i32"),
        ("bias_type", "i32"),
        ("scale", "f32"),
        ("lower_bound", "f32"),
    ),
)
"""Parameters of the chunk forward kernels. Strides and sizes in elements; ``flags`` are the ``FLAG_*`` bits.
``clusters``: how many clusters share all sequences and heads; 0: each has a cluster of its own. ``workspace``: room
for the states of sequences that two clusters share and, behind them, one flag a warp that says its part is written; or
for the chunks that helpers prepare and, behind them, one flag a scanning block that says a chunk is written.
``launch``: the value of a raised flag, different for every launch."""

RECURRENT = ParamStruct(
    "RecurrentParams",
    (
        *_INPUTS,
        *((name, "ptr") for name in ("h0", "ht", "indices", "accepted", "has_initial", "writes")),
        *((name, "i64") for name in ("h0_row", "ht_row")),
        *_strided("q", "k", "v", "g", "beta"),
        *((name, "i64") for name in ("hv_factor", "group_factor", "indices_row", "writes_row")),
        *((name, "i32") for name in ("N", "T", "H", "HV", "hv_shift", "group_shift", "fills_device")),
        *((name, "i32") for name in ("null_index", "gate", "flags")),
        *((name, "i32") for name in ("qkv_type", "g_type", "beta_type", "bias_type")),
        ("scale", "f32"),
        ("lower_bound", "f32"),
    ),
)
"""Parameters of the recurrent kernels; what changes from call to call comes first. ``i / HV`` is computed as
``i * hv_factor >> hv_shift``, and ``i / (HV / H)`` with ``group_factor`` and ``group_shift``. ``indices``: pool rows
that are read; ``writes``: those that are written, 0 where sequence n writes row n; ``has_initial``: one byte a
sequence, 0 if all have. ``fills_device``: the grid occupies the whole device, so the next launch may be placed before
this one begins."""

INTRA = ParamStruct(
    "IntraParams",
    (
        *((name, "ptr") for name in ("q", "k", "g", "beta", "cu_seqlens", "Aqk", "Akk")),
        *_strided("q", "k", "g", "beta"),
        ("T", "i64"),
        ("N", "i32"),
        ("H", "i32"),
        ("HV", "i32"),
        ("NT", "i32"),
        ("flags", "i32"),
        ("beta_type", "i32"),
        ("scale", "f32"),
    ),
)
"""Parameters of the stage ``kda_chunk_intra``. ``NT``: chunks of one batch row; outputs are contiguous."""

RECOMPUTE = ParamStruct(
    "RecomputeParams",
    (
        *((name, "ptr") for name in ("k", "v", "beta", "g", "Akk", "q", "cu_seqlens", "w", "u", "kg", "qg")),
        *_strided("k", "v", "beta", "g", "Akk", "q"),
        ("T", "i64"),
        ("N", "i32"),
        ("H", "i32"),
        ("HV", "i32"),
        ("NT", "i32"),
        ("flags", "i32"),
        ("beta_type", "i32"),
        ("whole", "i32"),
        ("in_turn", "i32"),
        ("kept", "i32"),
    ),
)
"""Parameters of the stage ``kda_recompute_w_u``; ``q`` and ``qg`` are 0 when q is not given. ``whole``, ``in_turn``,
``kept``: see :class:`kdacore_cuda.forms.stages.kernels.RecomputeGrid`; 0 where it does not apply."""

CHUNK_BACKWARD = ParamStruct(
    "ChunkBackwardParams",
    (
        *((name, "ptr") for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "d_o")),
        *((name, "ptr") for name in ("h0", "d_ht", "d_h0")),
        *(
            (name, "ptr")
            for name in ("kg", "kg_low", "qg", "w", "u", "aqk", "inv", "last", "rows", "h", "dh", "dr")
        ),
        *((name, "ptr") for name in ("dq", "dk", "dv", "dg", "dbeta", "dA_part", "dbias_part")),
        *((name, "ptr") for name in ("maps", "starts", "ends", "ready")),
        ("launch", "i64"),
        *_strided("q", "k", "v", "g", "beta"),
        ("T", "i64"),
        ("units", "i64"),
        *((f"{name}_factor", "i64") for name in ("hv", "chunks")),
        *((name, "i32") for name in ("N", "H", "HV", "NT", "gate", "flags", "beta_type", "bias_type")),
        *_SEGMENTS,
        *((name, "f32") for name in ("scale", "lower_bound", "floor", "centre")),
        *((f"{name}_shift", "i32") for name in ("hv", "chunks")),
    ),
)
"""Parameters of the backward kernels, one struct for all. csrc/sm90/chunk_backward/workspace.cuh describes the
workspace (``kg`` to ``dr``). ``d_o`` ``[B, T, HV, V]`` and all gradients are contiguous. ``units``: chunk slots times
HV; ``NT``: chunks of a dense sequence. ``hv_factor`` to ``chunks_shift``: to divide by HV and NT, see
:mod:`kdacore_cuda.request_encoding`. ``floor``: the lowest log2 decay of a step; ``centre``: an integer near half of
the sum of 32 such steps. ``dA_part`` is float32 ``[units]``, ``dbias_part`` float32 ``[units, K]``, both times
:data:`SUM_SCALE`. ``maps``, ``starts``, ``ends``: see csrc/sm90/chunk_backward/segments.cuh; ``segment`` to
``segments``: see :data:`SEGMENTS`. ``ready`` and ``launch``: see :data:`WALK`."""

SUM_SCALE = 2.0**-20
"""Of the parts that the gradients of A_log and dt_bias are the sums of: in these units sums of the largest numbers
stay finite."""

FORWARD_RESULTS = ParamStruct("ForwardResults", (("o", "ptr"), ("ht", "ptr")))
SCAN_OUTPUTS = ParamStruct(
    "ScanOutputsParams", (*FORWARD_RESULTS.fields, *CHUNK_BACKWARD.fields), (FORWARD_RESULTS, CHUNK_BACKWARD)
)
"""Parameters of the forward that keeps its workspace for the backward, csrc/sm90/chunk_backward/scan_outputs.cu. ``o``
``[B, T, HV, V]`` is contiguous, ``ht`` the final states, 0 where nobody wants them."""

UNIT_MARKS = ParamStruct(
    "UnitMarks",
    (("marks", "i64"), ("null_index", "i64"), ("mark_offsets", "ptr"), ("mark_rows", "ptr")),
)
PREPARE_MARKED = ParamStruct(
    "PrepareMarkedParams", (*UNIT_MARKS.fields, *CHUNK_BACKWARD.fields), (UNIT_MARKS, CHUNK_BACKWARD)
)
"""Parameters of the launch that also makes records of chunks cut off at checkpoints:
csrc/sm90/chunk_forward/segments/prepare_marked.cu."""

SEGMENTS = ParamStruct(
    "SegmentParams",
    (
        *(
            (name, "ptr")
            for name in (
                "v",
                "cu_seqlens",
                "o",
                "h0",
                "ht",
                "ckpt",
                "chunk_operands",
                "addends",
                "maps",
                "starts",
            )
        ),
        *_STATE_ROWS,
        *_MARKS,
        *_STATE_STRIDES,
        *_strided("v"),
        ("T", "i64"),
        *((name, "i32") for name in ("N", "HV", "NT")),
        *_SEGMENTS,
        *((name, "i32") for name in ("ckpt_every", "null_index", "marks", "flags")),
    ),
)
"""Parameters of the kernels that process a call in segments; csrc/sm90/chunk_forward/segments describes
``chunk_operands``, ``addends``, ``maps``, ``starts`` and ``mark_states``. ``NT`` and ``segments``: chunks and segments
of a dense sequence; ``segment``: chunks of each of its ``first_segments``; ``later_segment`` and ``middle_segment``: of
each of the next ``later_segments`` and of the next ``middle_segments``; ``long_segment``: of each of the others."""

TRANSITION = ParamStruct(
    "TransitionParams",
    (
        *((name, "ptr") for name in ("cu_seqlens", "addends", "maps", "M", "C")),
        ("T", "i64"),
        *((name, "i32") for name in ("N", "HV", "NT")),
        *_SEGMENTS,
        ("flags", "i32"),
    ),
)
"""Parameters of the launch that composes the maps of segments, for context parallelism. ``M`` and ``C`` are float32
``[G, HV, 128, 128]``: of each sequence, or of the last one of a pack."""

WALK = ParamStruct(
    "WalkParams",
    (
        *((name, "ptr") for name in ("v", "o", "h0", "ht", "ckpt", "chunk_operands", "ready")),
        ("launch", "i64"),
        *_strided("v"),
        ("T", "i64"),
        *((name, "i32") for name in ("N", "HV", "NT", "ckpt_every", "flags")),
    ),
)
"""Parameters of the launch that walks every sequence and value head; csrc/sm90/chunk_forward/dataflow describes it.
``ready``: the flags of units. ``launch``: the value of a raised one, different for every call."""

GATED_DELTA = ParamStruct(
    "GatedDeltaParams",
    (
        *_INPUTS,
        *((name, "ptr") for name in ("h0", "ht", "ckpt", "records")),
        *_STATE_ROWS,
        *_STATE_STRIDES,
        *_strided("q", "k", "v", "g", "beta"),
        ("T", "i64"),
        *((f"{name}_factor", "i64") for name in ("h", "group", "chunks")),
        *((name, "i32") for name in ("N", "H", "HV", "NT", "ckpt_every", "null_index", "gate", "flags")),
        *((name, "i32") for name in ("g_type", "beta_type", "bias_type")),
        *((f"{name}_shift", "i32") for name in ("h", "group", "chunks")),
        ("scale", "f32"),
        ("lower_bound", "f32"),
    ),
)
"""Parameters of both launches of the gated delta rule, csrc/sm90/gated_delta. ``records``: what the first leaves for
the second. ``h_factor`` to ``chunks_shift``: to divide by H, HV / H and NT."""

CHECKPOINT_TAIL = ParamStruct(
    "CheckpointTailParams",
    (
        *((name, "ptr") for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "ht", "reads")),
        *_MARKS,
        ("ht_row", "i64"),
        *_strided("k", "v", "g", "beta"),
        ("T", "i64"),
        *((name, "i32") for name in ("N", "H", "HV", "step", "null_index", "marks", "gate", "flags")),
        *((name, "i32") for name in ("g_type", "beta_type", "bias_type")),
        ("lower_bound", "f32"),
    ),
)
"""Parameters of the launch that brings checkpoints from the start of a step, of ``step`` tokens, to their token."""

SUMS = ParamStruct(
    "SumsParams",
    (
        *((name, "ptr") for name in ("dA_part", "dbias_part", "d_A", "d_bias")),
        *((name, "i32") for name in ("slots", "HV", "A_type", "bias_type")),
    ),
)
"""Parameters of the sums over chunks of float32 ``[slots, HV]`` and ``[slots, HV, K]``; a result of 0 is not wanted."""

GROUPS = ParamStruct(
    "GroupsParams",
    (
        *((name, "ptr") for name in ("x", "part", "out")),
        *_strided("x"),
        *((name, "i64") for name in ("T", "rows")),
        *((name, "i32") for name in ("H", "HV", "flags")),
    ),
)
"""Parameters of the sums over a group's value heads: ``part`` float32 ``[B, T, HV, K]``, ``x`` q or k as given, ``out``
like x but contiguous. ``rows``: B * T * H."""

FLAGS: dict[str, int] = {
    name: 1 << bit
    for bit, name in enumerate(
        (
            "L2NORM",
            "BETA_SIGMOID",
            "NEG_EIGVAL",
            "V_FIRST",
            "STATE_BF16",
            "CU64",
            "INDEX64",
            "ACCEPTED64",
            "SCATTER_TOKENS",
            "INDEXED_OUT",
            "SCALAR_GATE",
            "WRITES64",
            "CLEAR_TAIL",
            "MARK_OFFSETS64",
            "MARK_ROWS64",
            "KEPT_MAPS",
            "EARLY_OUTPUT",
            "KEEP_STARTS",
        )
    )
}
"""Bits of ``flags``. ``INDEXED_OUT``: final states go to the pool rows that ``writes`` names. ``SCATTER_TOKENS``: the
state after every token goes to its own pool row. ``SCALAR_GATE``: one decay per head, ``g [B, T, HV]``.
``CLEAR_TAIL``: rows of ``o`` beyond the last offset of a pack are to be zero. ``KEPT_MAPS``: a backward takes each
segment's map of the state, and the state at its start, from what the forward kept. ``EARLY_OUTPUT``: the
launch that chains segments lets the next one begin, which loads operands on multiprocessors that are idle.
``KEEP_STARTS``: a launch that finds the states at the start of segments itself stores them for the backward."""

GATES: dict[str, int] = {"log": 0, "softplus": 1, "sigmoid": 2}
TYPES: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
ITEM_SIZES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the name of its dtype."""


STEP_TOKENS, SEQUENCE_OVERHEAD_STEPS = 32, 2
"""Chunk forward on Hopper: tokens of a chunk; the fixed cost of a sequence, in chunks, as measured."""
TICKETS_BYTES = 128
"""Of its workspace, in front of all else: where clusters draw tickets."""


def _once(text: str) -> str:
    return "#pragma once\n" + text


def constants_header() -> str:
    """C++ text of the enumerations the host passes as integers."""
    lines = [
        f"constexpr int {prefix}_{name.upper()} = {value};\n"
        for prefix, table in (("FLAG", FLAGS), ("GATE", GATES), ("TYPE", TYPES))
        for name, value in table.items()
    ]
    return "".join(lines)


@cache
def generated_headers() -> Mapping[str, str]:
    """Include name -> text of every header made from this file."""
    return {
        "generated/chunk_forward_params.cuh": _once(CHUNK_FORWARD.header()),
        "generated/recurrent_params.cuh": _once(RECURRENT.header()),
        "generated/stage_params.cuh": _once(INTRA.header() + RECOMPUTE.header()),
        "generated/chunk_backward_params.cuh": _once(
            CHUNK_BACKWARD.header()
            + SUMS.header()
            + GROUPS.header()
            + f"constexpr float SUM_SCALE = {SUM_SCALE}f;\n"
        ),
        "generated/prepare_marked_params.cuh": _once(
            '#include "generated/chunk_backward_params.cuh"\n' + UNIT_MARKS.header() + PREPARE_MARKED.header()
        ),
        "generated/scan_outputs_params.cuh": _once(
            '#include "generated/chunk_backward_params.cuh"\n'
            + FORWARD_RESULTS.header()
            + SCAN_OUTPUTS.header()
        ),
        "generated/segment_params.cuh": _once(SEGMENTS.header()),
        "generated/transition_params.cuh": _once(TRANSITION.header()),
        "generated/gated_delta_params.cuh": _once(GATED_DELTA.header()),
        "generated/walk_params.cuh": _once(WALK.header()),
        "generated/checkpoint_tail_params.cuh": _once(CHECKPOINT_TAIL.header()),
        "generated/steps.cuh": _once(
            f"constexpr int STEP_TOKENS = {STEP_TOKENS};\n"
            f"constexpr int SEQUENCE_OVERHEAD_STEPS = {SEQUENCE_OVERHEAD_STEPS};\n"
            f"constexpr unsigned TICKETS_BYTES = {TICKETS_BYTES};\n"
        ),
        "generated/constants.cuh": _once(constants_header()),
    }
