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
Fields = tuple[tuple[str, FieldType], ...]
"""Names and kinds of a struct's fields, in order."""

_C_NAMES: dict[str, str] = {"ptr": "unsigned long long", "i64": "long long", "i32": "int", "f32": "float"}
_FORMATS: dict[str, str] = {"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"}


@dataclass(frozen=True)
class ParamStruct:
    """A by-value kernel parameter. Eight-byte fields come first, so the C layout has no holes."""

    name: str
    fields: Fields
    parts: tuple[ParamStruct, ...] = ()
    """Structs one after the other, whose fields these are; the C struct inherits from them."""
    packer: struct.Struct = field(init=False, repr=False, compare=False)
    offsets: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = "<" + "".join(_FORMATS[kind] for _, kind in self.fields)
        sizes = [struct.calcsize(x) for x in text[1:]]
        if sizes != sorted(sizes, reverse=True):
            raise ValueError(f"{self.name}: 8-byte fields must come before 4-byte fields")
        offsets = {name: struct.calcsize(text[: 1 + i]) for i, (name, _) in enumerate(self.fields)}
        object.__setattr__(self, "packer", struct.Struct(f"{text}{-struct.calcsize(text) % 8}x"))
        object.__setattr__(self, "offsets", offsets)

    @property
    def size(self) -> int:
        """Bytes, a multiple of 8 as in C."""
        return self.packer.size

    def header(self) -> str:
        """C++ text: the struct, and an assertion that the compiler laid it out as :attr:`packer` packs it."""
        if self.parts:
            lines = [f"struct {self.name} : {', '.join(part.name for part in self.parts)} {{}};"]
        else:
            fields = (f"  {_C_NAMES[kind]} {name};" for name, kind in self.fields)
            lines = [f"struct {self.name} {{", *fields, "};"]
        lines.append(f'static_assert(sizeof({self.name}) == {self.size}, "{self.name} size");')
        return "\n".join(lines) + "\n"


def _fields(kind: FieldType, names: str) -> Fields:
    """Fields of one kind."""
    return tuple((name, kind) for name in names.split())


def _strided(names: str) -> Fields:
    """Batch, token and head strides in elements, for each named array."""
    return tuple((f"{name}_{axis}", "i64") for name in names.split() for axis in ("sb", "st", "sh"))


def _joined(name: str, *parts: ParamStruct) -> ParamStruct:
    """Structs one after the other."""
    return ParamStruct(name, tuple(field for part in parts for field in part.fields), parts)


_INPUTS = _fields("ptr", "q k v g beta A_log dt_bias cu_seqlens")
_TOKEN_STRIDES = _strided("q k v g beta")
_STATE_ROWS, _STATE_STRIDES = _fields("ptr", "reads has_initial writes"), _fields("i64", "h0_row ht_row")
"""Which rows of pools are read and written: csrc/common/state_rows.cuh."""
_MARKS = _fields("ptr", "mark_offsets mark_rows mark_states")
"""Checkpoints at chosen tokens: csrc/common/chunk_forward/marks.cuh."""
_SEGMENTS = (
    *_fields("i32", "segment first_segments later_segment later_segments"),
    *_fields("i32", "middle_segment middle_segments long_segment segments"),
)
"""How a sequence is cut into segments: csrc/sm90/chunk_forward/segments/segment.cuh."""
SEGMENT_LENGTHS = tuple(name for name, _ in _SEGMENTS[:-1])

_HEAD_DIMS = _fields("i32", "K V value_blocks")
"""Read by kernels of other head dims than their own: csrc/sm90/head_dims.cuh."""

CHUNK_FORWARD = ParamStruct(
    "ChunkForwardParams",
    (
        *(*_INPUTS, *_fields("ptr", "o h0 ht ckpt workspace"), *_STATE_ROWS, *_MARKS),
        *(*_fields("i64", "launch"), *_STATE_STRIDES, *_TOKEN_STRIDES, *_fields("i64", "T")),
        *_fields("i32", "N H HV clusters ckpt_every null_index marks gate flags beta_type bias_type"),
        *(*_fields("f32", "scale lower_bound"), *_HEAD_DIMS, *_fields("i32", "spacing")),
    ),
)
"""Parameters of the chunk forward kernels. Strides and sizes in elements; ``flags`` are the ``FLAG_*`` bits.
``clusters``: how many clusters share all sequences and heads; 0: each has a cluster of its own. ``workspace``: room
for the states of sequences that two clusters share and, behind them, one flag a warp that says its part is written; or
for the chunks that helpers prepare and, behind them, one flag a scanning block that says a chunk is written.
``launch``: the value of a raised flag, different for every launch. ``spacing``: where helpers prepare for clusters of
two, from one step that a cluster prepares itself to the next, in 1/65536: csrc/sm90/chunk_forward/helped_steps.cuh."""

RECURRENT = ParamStruct(
    "RecurrentParams",
    (
        *(*_INPUTS, *_fields("ptr", "o h0 ht indices accepted has_initial writes"), *_STATE_STRIDES),
        *(*_TOKEN_STRIDES, *_fields("i64", "hv_factor group_factor indices_row writes_row")),
        *_fields("i32", "N T H HV hv_shift group_shift fills_device null_index gate flags"),
        *(*_fields("i32", "qkv_type g_type beta_type bias_type"), *_fields("f32", "scale lower_bound")),
    ),
)
"""Parameters of the recurrent kernels; what changes from call to call comes first. ``i / HV`` is computed as
``i * hv_factor >> hv_shift``, and ``i / (HV / H)`` with ``group_factor`` and ``group_shift``. ``indices``: pool rows
that are read; ``writes``: those that are written, 0 where sequence n writes row n; ``has_initial``: one byte a
sequence, 0 if all have. ``fills_device``: the grid occupies the whole device, so the next launch may be placed before
this one begins."""

RECORD_STRIDES = tuple(
    f"{name}_{axis}"
    for name, axes in (("update", "sr st sh sv"), ("key", "sr st sh sk"), ("decay", "sr st sh sk"))
    for axis in axes.split()
)
RECORDS = ParamStruct(
    "RecordsParams",
    (
        *_fields("ptr", "record_update record_key record_decay record_indices num_replayed"),
        *_fields("i64", " ".join(RECORD_STRIDES)),
        *_fields("i64", "records record_slots wide_records wide_counts"),
    ),
)
RECURRENT_RECORDS = _joined("RecurrentRecordsParams", RECORDS, RECURRENT)
"""Parameters of the recurrent kernels with records of candidates: where these lie, strides in elements (of rows,
records, heads, and columns or channels; the last is 0 with one decay a head), and how many there are in a row, of
which a call writes the first ``record_slots``. ``wide_records``, ``wide_counts``: ``record_indices`` and
``num_replayed`` have 64 bits."""

DECODE_ARRAYS = ParamStruct(
    "DecodeArrays",
    (
        *_fields("ptr", "x conv_weight conv_bias conv_state conv_indices conv_windows z norm_weight"),
        *_fields("i64", "x_sb x_st conv_sr conv_sc conv_sl window_sr window_st window_sl window_sc"),
        *_fields("i64", "z_sb z_st z_sh z_sv norm_sh task_factor tasks"),
    ),
)
DECODE_NUMBERS = ParamStruct(
    "DecodeNumbers",
    (
        *_fields("i32", "task_shift taps x_type conv_weight_type conv_bias_type z_type norm_type"),
        *_fields("i32", "wide_conv writes_conv writes_keys keeps_candidates z_whole silu"),
        *_fields("f32", "norm_eps"),
    ),
)
DECODE = _joined("DecodeParams", DECODE_ARRAYS, RECURRENT, DECODE_NUMBERS)
"""Parameters of the fused decode step: those of the recurrent kernels, without q, k and v, and of what is around the
recurrence. Strides in elements: ``conv`` of rows, channels and columns, ``window`` of rows, candidates, tokens and
channels. ``tasks``: clusters of blocks of a sequence; ``task_factor`` and ``task_shift``: to divide by it. ``taps``:
the convolution's width. ``wide_conv``: ``conv_indices`` has 64 bits. ``writes_conv``: windows are written;
``writes_keys``: those of q and k by this launch; ``keeps_candidates``: of each candidate. ``z_whole``: four elements
of z lie together and can be read at once."""

DECODE_RECORDS = _joined("DecodeRecordsParams", RECORDS, DECODE)
"""Parameters of the fused decode step with records of candidates, or with rows of their windows: ``record_update`` is
0 where only the latter are given. Of ``commit_windows`` ``tasks`` are channels of ``conv_state``, and ``taps`` is one
more than its columns, or than those of ``conv_windows``."""

INTRA = ParamStruct(
    "IntraParams",
    (
        *(*_fields("ptr", "q k g beta cu_seqlens Aqk Akk"), *_strided("q k g beta"), *_fields("i64", "T")),
        *(*_fields("i32", "N H HV NT flags beta_type"), *_fields("f32", "scale")),
    ),
)
"""Parameters of the stage ``kda_chunk_intra``. ``NT``: chunks of one batch row; outputs are contiguous."""

RECOMPUTE = ParamStruct(
    "RecomputeParams",
    (
        *_fields("ptr", "k v beta g Akk q cu_seqlens w u kg qg"),
        *(*_strided("k v beta g Akk q"), *_fields("i64", "T")),
        *_fields("i32", "N H HV NT flags beta_type whole in_turn kept"),
    ),
)
"""Parameters of the stage ``kda_recompute_w_u``; ``q`` and ``qg`` are 0 when q is not given. ``whole``, ``in_turn``,
``kept``: see :class:`kdacore_cuda.forms.stages.kernels.RecomputeGrid`; 0 where it does not apply."""

CHUNK_BACKWARD = ParamStruct(
    "ChunkBackwardParams",
    (
        *(*_INPUTS, *_fields("ptr", "d_o h0 d_ht d_h0")),
        *_fields("ptr", "kg kg_low qg w u aqk inv last rows h dh dr"),
        *_fields("ptr", "dq dk dv dg dbeta dA_part dbias_part maps starts ends ready"),
        *(*_fields("i64", "launch"), *_TOKEN_STRIDES, *_fields("i64", "T units hv_factor chunks_factor")),
        *(*_fields("i32", "N H HV NT gate flags beta_type bias_type"), *_SEGMENTS),
        *(*_fields("f32", "scale lower_bound floor centre"), *_fields("i32", "hv_shift chunks_shift")),
        *_HEAD_DIMS,
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

FORWARD_RESULTS = ParamStruct("ForwardResults", _fields("ptr", "o ht"))
SCAN_OUTPUTS = _joined("ScanOutputsParams", FORWARD_RESULTS, CHUNK_BACKWARD)
"""Parameters of the forward that keeps its workspace for the backward, csrc/sm90/chunk_backward/scan_outputs.cu. ``o``
``[B, T, HV, V]`` is contiguous, ``ht`` the final states, 0 where nobody wants them."""

UNIT_MARKS = ParamStruct(
    "UnitMarks", (*_fields("i64", "marks null_index"), *_fields("ptr", "mark_offsets mark_rows"))
)
PREPARE_MARKED = _joined("PrepareMarkedParams", UNIT_MARKS, CHUNK_BACKWARD)
"""Parameters of the launch that also makes records of chunks cut off at checkpoints:
csrc/sm90/chunk_forward/segments/prepare_marked.cu."""

SEGMENTS = ParamStruct(
    "SegmentParams",
    (
        *_fields("ptr", "v cu_seqlens o h0 ht ckpt chunk_operands addends maps starts"),
        *(*_STATE_ROWS, *_MARKS, *_STATE_STRIDES, *_strided("v"), *_fields("i64", "T")),
        *(*_fields("i32", "N HV NT"), *_SEGMENTS, *_fields("i32", "ckpt_every null_index marks flags")),
    ),
)
"""Parameters of the kernels that process a call in segments; csrc/sm90/chunk_forward/segments describes
``chunk_operands``, ``addends``, ``maps``, ``starts`` and ``mark_states``. ``NT`` and ``segments``: chunks and segments
of a dense sequence; ``segment``: chunks of each of its ``first_segments``; ``later_segment`` and ``middle_segment``: of
each of the next ``later_segments`` and of the next ``middle_segments``; ``long_segment``: of each of the others."""

TRANSITION = ParamStruct(
    "TransitionParams",
    (
        *(*_fields("ptr", "cu_seqlens addends maps M C"), *_fields("i64", "T")),
        *(*_fields("i32", "N HV NT"), *_SEGMENTS, *_fields("i32", "flags")),
    ),
)
"""Parameters of the launch that composes the maps of segments, for context parallelism. ``M`` and ``C`` are float32
``[G, HV, 128, 128]``: of each sequence, or of the last one of a pack."""

WALK = ParamStruct(
    "WalkParams",
    (
        *_fields("ptr", "v o h0 ht ckpt chunk_operands ready"),
        *(*_fields("i64", "launch"), *_strided("v"), *_fields("i64", "T")),
        *_fields("i32", "N HV NT ckpt_every flags"),
    ),
)
"""Parameters of the launch that walks every sequence and value head; csrc/sm90/chunk_forward/dataflow describes it.
``ready``: the flags of units. ``launch``: the value of a raised one, different for every call."""

GATED_DELTA = ParamStruct(
    "GatedDeltaParams",
    (
        *(*_INPUTS, *_fields("ptr", "o h0 ht ckpt records"), *_STATE_ROWS, *_MARKS, *_STATE_STRIDES),
        *(*_TOKEN_STRIDES, *_fields("i64", "marks")),
        *_fields("i64", "T h_factor group_factor chunks_factor"),
        *_fields("i32", "N H HV K V NT ckpt_every null_index gate flags g_type beta_type bias_type"),
        *(*_fields("i32", "h_shift group_shift chunks_shift"), *_fields("f32", "scale lower_bound")),
    ),
)
"""Parameters of both launches of the gated delta rule, csrc/sm90/gated_delta. ``records``: what the first leaves for
the second. ``h_factor`` to ``chunks_shift``: to divide by H, HV / H and NT. ``K`` and ``V`` are read by kernels of
narrow heads (csrc/sm90/gated_delta/head_dims.cuh)."""

RECORD_UNITS = ParamStruct("RecordUnits", _fields("i64", "units"))
GATED_DELTA_RECORDS = _joined("GatedDeltaRecordsParams", RECORD_UNITS, GATED_DELTA)
"""Parameters of the launch that makes records. ``units``: chunk slots times H."""

RECORD_FLAGS = ParamStruct("RecordFlags", (*_fields("ptr", "ready"), *_fields("i64", "launch")))
GATED_DELTA_BESIDE = _joined("GatedDeltaBesideParams", RECORD_FLAGS, GATED_DELTA)
"""Parameters of the same two launches where they run side by side. ``ready``: the flags of records.
``launch``: the value of a raised one, different for every call."""
ORDERED_SEQUENCES = 32
"""Sequences of a pack, at most, whose records are made side by side with walks:
csrc/sm90/gated_delta/unit_order.cuh."""

GATED_DELTA_GRADIENTS = ParamStruct(
    "GatedDeltaGradients",
    (
        *_fields("ptr", "d_o d_ht d_h0 u states state_grads"),
        *_fields("ptr", "dq dk dv dg dbeta dA_part dbias_part"),
        *_fields("i64", "units"),
    ),
)
GATED_DELTA_BACKWARD = _joined("GatedDeltaBackwardParams", GATED_DELTA_GRADIENTS, GATED_DELTA)
"""Parameters of the launches that keep what a backward needs, and of the backward's own: those of the forward and
more. ``u``, ``states``, ``state_grads``: the workspace, csrc/sm90/gated_delta/backward_workspace.cuh. ``d_o``
``[B, T, HV, V]`` and all gradients are contiguous; ``d_ht`` and ``d_h0`` are ``[N, HV, ...]`` in the states' layout
and dtype, 0 where there is none. ``dA_part`` and ``dbias_part`` are float32 ``[slots, HV]``, times
:data:`SUM_SCALE`. ``units``: chunk slots times H."""

GATED_DELTA_MAPS = ParamStruct("GatedDeltaMaps", _fields("ptr", "maps addends starts"))
CUT = ParamStruct("Cut", _SEGMENTS)
GATED_DELTA_SEGMENTS = _joined("GatedDeltaSegmentParams", GATED_DELTA_MAPS, GATED_DELTA, CUT)
GATED_DELTA_BACKWARD_MAPS = ParamStruct("GatedDeltaBackwardMaps", _fields("ptr", "maps starts ends"))
GATED_DELTA_BACKWARD_SEGMENTS = _joined(
    "GatedDeltaBackwardSegmentParams", GATED_DELTA_BACKWARD_MAPS, GATED_DELTA_BACKWARD, CUT
)
"""Parameters of the launches that walk segments: those of the forward, :data:`SEGMENTS`'s ``maps``, ``addends`` and
``starts``, and how a sequence is cut; or those of the backward, and :data:`CHUNK_BACKWARD`'s ``maps``, ``starts`` and
``ends``."""

CHECKPOINT_TAIL = ParamStruct(
    "CheckpointTailParams",
    (
        *(*_fields("ptr", "k v g beta A_log dt_bias cu_seqlens ht reads"), *_MARKS),
        *(*_fields("i64", "ht_row"), *_strided("k v g beta"), *_fields("i64", "T")),
        *_fields("i32", "N H HV step null_index marks gate flags g_type beta_type bias_type"),
        *_fields("f32", "lower_bound"),
    ),
)
"""Parameters of the launch that brings checkpoints from the start of a step, of ``step`` tokens, to their token."""

SUMS = ParamStruct(
    "SumsParams",
    (*_fields("ptr", "dA_part dbias_part d_A d_bias"), *_fields("i32", "slots HV A_type bias_type K")),
)
"""Parameters of the sums over chunks of float32 ``[slots, HV]`` and ``[slots, HV, 128]``; a result of 0 is not wanted.
``K``: channels of a head."""

GROUPS = ParamStruct(
    "GroupsParams",
    (
        *(*_fields("ptr", "x part out"), *_strided("x"), *_fields("i64", "T rows")),
        *_fields("i32", "H HV flags K"),
    ),
)
"""Parameters of the sums over a group's value heads: ``part`` float32 ``[B, T, HV, 128]``, ``x`` q or k as given,
``out`` like x but contiguous, with K channels. ``rows``: B * T * H."""

_FLAGS = """
L2NORM BETA_SIGMOID NEG_EIGVAL V_FIRST STATE_BF16 CU64 INDEX64 ACCEPTED64 SCATTER_TOKENS INDEXED_OUT SCALAR_GATE
WRITES64 CLEAR_TAIL MARK_OFFSETS64 MARK_ROWS64 KEPT_MAPS EARLY_OUTPUT KEEP_STARTS NONZERO_BETA
"""
FLAGS: dict[str, int] = {name: 1 << bit for bit, name in enumerate(_FLAGS.split())}
"""Bits of ``flags``. ``INDEXED_OUT``: final states go to the pool rows that ``writes`` names. ``SCATTER_TOKENS``: the
state after every token goes to its own pool row. ``SCALAR_GATE``: one decay per head, ``g [B, T, HV]``.
``CLEAR_TAIL``: rows of ``o`` beyond the last offset of a pack are to be zero. ``KEPT_MAPS``: a backward takes each
segment's map of the state, and the state at its start, from what the forward kept. ``EARLY_OUTPUT``: the
launch that chains segments lets the next one begin, which loads operands on multiprocessors that are idle.
``KEEP_STARTS``: a launch that finds the states at the start of segments itself stores them for the backward.
``NONZERO_BETA``: a beta below 2^-64 counts as 2^-64, so that what is divided by it is finite."""

GATES: dict[str, int] = {"log": 0, "softplus": 1, "sigmoid": 2}
TYPES: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
ITEM_SIZES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the name of its dtype."""


STEP_TOKENS, SEQUENCE_OVERHEAD_STEPS = 32, 2
"""Chunk forward on Hopper: tokens of a chunk; the fixed cost of a sequence, in chunks, as measured."""
OWN_START, LEAST_SPACING, MOST_SPACING = 3, (6 << 16) // 5 + 1, 3 << 16
"""Where helpers prepare for clusters of two: steps that these prepare first; limits of ``spacing`` behind those:
csrc/sm90/chunk_forward/helped_steps.cuh."""
TICKETS_BYTES = 128
"""Of its workspace, in front of all else: where clusters draw tickets."""


_STRUCTS = {
    "chunk_forward_params": (CHUNK_FORWARD,),
    "recurrent_params": (RECURRENT,),
    "recurrent_records_params": (RECORDS, RECURRENT_RECORDS),
    "decode_params": (DECODE_ARRAYS, DECODE_NUMBERS, DECODE),
    "decode_records_params": (DECODE_RECORDS,),
    "stage_params": (INTRA, RECOMPUTE),
    "chunk_backward_params": (CHUNK_BACKWARD, SUMS, GROUPS),
    "prepare_marked_params": (UNIT_MARKS, PREPARE_MARKED),
    "scan_outputs_params": (FORWARD_RESULTS, SCAN_OUTPUTS),
    "segment_params": (SEGMENTS,),
    "transition_params": (TRANSITION,),
    "gated_delta_params": (GATED_DELTA,),
    "gated_delta_backward_params": (GATED_DELTA_GRADIENTS, GATED_DELTA_BACKWARD),
    "gated_delta_segment_params": (GATED_DELTA_MAPS, CUT, GATED_DELTA_SEGMENTS),
    "gated_delta_beside_params": (RECORD_FLAGS, GATED_DELTA_BESIDE),
    "gated_delta_records_params": (RECORD_UNITS, GATED_DELTA_RECORDS),
    "gated_delta_backward_segment_params": (GATED_DELTA_BACKWARD_MAPS, GATED_DELTA_BACKWARD_SEGMENTS),
    "walk_params": (WALK,),
    "checkpoint_tail_params": (CHECKPOINT_TAIL,),
}
"""Header -> its structs. It includes the headers that have their other parts."""
_CONSTANTS: dict[str, dict[str, object]] = {
    "chunk_backward_params": {"float SUM_SCALE": f"{SUM_SCALE}f"},
    "gated_delta_beside_params": {"int ORDERED_SEQUENCES": ORDERED_SEQUENCES},
    "steps": {
        "int STEP_TOKENS": STEP_TOKENS,
        "int SEQUENCE_OVERHEAD_STEPS": SEQUENCE_OVERHEAD_STEPS,
        "unsigned OWN_START": OWN_START,
        "int LEAST_SPACING": LEAST_SPACING,
        "int MOST_SPACING": MOST_SPACING,
        "unsigned TICKETS_BYTES": TICKETS_BYTES,
    },
    "constants": {
        f"int {prefix}_{name.upper()}": value
        for prefix, table in (("FLAG", FLAGS), ("GATE", GATES), ("TYPE", TYPES))
        for name, value in table.items()
    },
}
"""Header -> its constants, behind structs."""


@cache
def generated_headers() -> Mapping[str, str]:
    """Include name -> text of every header made from this file."""
    homes = {struct: name for name, structs in _STRUCTS.items() for struct in structs}
    texts = {}
    for name in {**_STRUCTS, **_CONSTANTS}:
        structs, constants = _STRUCTS.get(name, ()), _CONSTANTS.get(name, {})
        others = [homes[part] for struct in structs for part in struct.parts if part not in structs]
        lines = ["#pragma once\n", *(f'#include "generated/{home}.cuh"\n' for home in others)]
        lines += [struct.header() for struct in structs]
        lines += [f"constexpr {constant} = {value};\n" for constant, value in constants.items()]
        texts[f"generated/{name}.cuh"] = "".join(lines)
    return texts
