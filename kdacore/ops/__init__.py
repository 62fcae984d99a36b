"""The ops: one definition each, of the arguments in :mod:`kdacore.ops.arguments_and_options`.

Everything that says what arguments an op takes derives from these; ``python -m codegen.public_api`` writes the public
functions from them.
"""

from __future__ import annotations

from kdacore import types as t
from kdacore.ops.arguments_and_options import (
    A_LOG,
    CHUNK_ARRAYS,
    CHUNK_OPTIONS,
    CHUNK_SIZE,
    COMMIT_ARRAYS,
    COMMIT_OPTIONS,
    DECODE_ARRAYS,
    DT_BIAS,
    LOWER_BOUND,
    PACKED,
    RECURRENT_ARRAYS,
    RECURRENT_OPTIONS,
    SCALE,
    STATE_V_FIRST,
    decode_options,
    described,
    required,
)
from kdacore.ops.definition import ArrayArgument, OpDef, Option
from kdacore.ops.feature_families import (
    CHECKPOINT_FEATURES,
    GATE_FEATURES,
    POOL_FEATURES,
    RECURRENT_FEATURES,
    SEQUENCE_FEATURES,
    STAGE_FEATURES,
)

__all__ = [
    "CHECKPOINT_FEATURES",
    "DIFFERENTIABLE",
    "FEATURES",
    "GATE_FEATURES",
    "HOST_ARGUMENTS",
    "INDEX_ARGUMENTS",
    "MASK_ARGUMENTS",
    "OPS",
    "POOL_FEATURES",
    "RECURRENT_FEATURES",
    "SEQUENCE_FEATURES",
    "STAGES",
    "STAGE_FEATURES",
    "WRITABLE_ARGUMENTS",
    "ArrayArgument",
    "OpDef",
    "Option",
]


_ONE_GATE_A_HEAD = {
    "g": "``[B, T, HV]``, float32, bfloat16 or float16; float64 in calls of float64: one log decay "
    "(natural log, <= 0) for each token and head, or its raw gate input.",
    "dt_bias": "``[HV]``, any float dtype.",
}
_ONE_DECAY_A_HEAD = {
    "record_decay": "``(update [R, n, HV, V], key [R, n, H, K], decay [R, n, HV])``, float32 (float64 in "
    "calls of float64), any strides: as "
    "the records of :func:`fused_recurrent_kda`, with one decay a head.",
}


def _chunk(name: str, scalar_gate: bool) -> OpDef:
    arrays = described(CHUNK_ARRAYS, **_ONE_GATE_A_HEAD) if scalar_gate else CHUNK_ARRAYS
    return OpDef(name, "chunk", t.ChunkInputs, arrays, CHUNK_OPTIONS, t.Outputs, scalar_gate)


def _recurrent(name: str, scalar_gate: bool) -> OpDef:
    heads = {**_ONE_GATE_A_HEAD, **_ONE_DECAY_A_HEAD}
    arrays = described(RECURRENT_ARRAYS, **heads) if scalar_gate else RECURRENT_ARRAYS
    return OpDef(name, "recurrent", t.RecurrentInputs, arrays, RECURRENT_OPTIONS, t.Outputs, scalar_gate)


def _decode(name: str, activation: str, scalar_gate: bool) -> OpDef:
    heads = {**_ONE_GATE_A_HEAD, **_ONE_DECAY_A_HEAD}
    arrays = described(DECODE_ARRAYS, **heads) if scalar_gate else DECODE_ARRAYS
    return OpDef(name, "decode", t.DecodeInputs, arrays, decode_options(activation), t.Outputs, scalar_gate)


def _stage(
    name: str,
    inputs: type,
    arrays: tuple[ArrayArgument, ...],
    options: tuple[Option, ...],
    outputs: type | None = None,
) -> OpDef:
    return OpDef(name, "stage", inputs, (*arrays, *PACKED), options, outputs)


OPS: dict[str, OpDef] = {
    definition.name: definition
    for definition in (
        _chunk("chunk_kda", scalar_gate=False),
        _chunk("chunk_gated_delta_rule", scalar_gate=True),
        _recurrent("fused_recurrent_kda", scalar_gate=False),
        _recurrent("fused_recurrent_gated_delta_rule", scalar_gate=True),
        _decode("fused_decode_kda", "sigmoid", scalar_gate=False),
        _decode("fused_decode_gated_delta_rule", "silu", scalar_gate=True),
        OpDef("commit_records", "commit", t.CommitInputs, COMMIT_ARRAYS, COMMIT_OPTIONS, t.CommitOutputs),
        OpDef(
            "kda_gate",
            "gate",
            t.GateInputs,
            described(
                (*required("g", differentiable=True), A_LOG, DT_BIAS),
                g="``[B, T, HV, K]``, or ``[B, T, HV]`` for one gate per head; any float dtype.",
                A_log="``[HV]`` float32 (float64 is taken too); needed without ``lower_bound``.",
                dt_bias="``[HV, K]`` or ``[HV*K]`` (``[HV]`` for one gate per head), any float dtype.",
            ),
            described(
                (LOWER_BOUND,),
                lower_bound="a negative number of 1e-30 to 1e30 in size, or None for the unbounded gate.",
            ),
        ),
        _stage(
            "kda_chunk_gate",
            t.ChunkGateInputs,
            (*required("g"), A_LOG, DT_BIAS),
            (LOWER_BOUND, CHUNK_SIZE),
        ),
        _stage(
            "kda_chunk_intra",
            t.IntraInputs,
            required("q", "k", "gc", "beta"),
            (SCALE, CHUNK_SIZE),
            t.IntraOutputs,
        ),
        _stage(
            "kda_recompute_w_u",
            t.RecomputeInputs,
            (*required("k", "v", "beta", "gc", "Akk"), ArrayArgument("q", feature="q")),
            (CHUNK_SIZE,),
            t.RecomputeOutputs,
        ),
        _stage(
            "delta_rule_chunk_state",
            t.ChunkStateInputs,
            (*required("kg", "w", "u", "gc"), ArrayArgument("initial_state", feature="initial_state")),
            (CHUNK_SIZE, STATE_V_FIRST),
            t.ChunkStateOutputs,
        ),
        _stage(
            "kda_chunk_output",
            t.ChunkOutputInputs,
            required("q", "v_new", "gc", "Aqk", "h"),
            (SCALE, CHUNK_SIZE),
        ),
    )
}
"""Every op by its public name."""

FEATURES: frozenset[str] = frozenset().union(*[definition.features for definition in OPS.values()])
"""Every feature that a call of any op can use."""

STAGES: tuple[str, ...] = tuple([name for name, definition in OPS.items() if definition.family == "stage"])


def _names(property_name: str) -> tuple[str, ...]:
    """Arrays of any op that have a property, in the order of the ops' arguments."""
    arguments = [a for definition in OPS.values() for a in definition.array_arguments]
    return tuple(dict.fromkeys([a.name for a in arguments if getattr(a, property_name)]))


HOST_ARGUMENTS = frozenset(_names("host"))
INDEX_ARGUMENTS = frozenset(_names("index"))
MASK_ARGUMENTS = frozenset(_names("mask"))
WRITABLE_ARGUMENTS = frozenset(_names("writable"))
DIFFERENTIABLE = _names("differentiable")
