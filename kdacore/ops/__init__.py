"""The ops: one definition each. Everything that says what arguments an op takes derives from these.

To add an option to an op: CONTRIBUTING.md, "Adding an option".
"""

from __future__ import annotations

from kdacore import types as t
from kdacore.ops.definition import ArrayArgument, OpDef, Option

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

# --- arguments that several ops share -----------------------------------------------------------------------------

_A_LOG = ArrayArgument("A_log", differentiable=True)
_DT_BIAS = ArrayArgument("dt_bias", differentiable=True)
_PACKED = (
    ArrayArgument("cu_seqlens", feature="packed", index=True),
    ArrayArgument("cu_seqlens_cpu", host=True, index=True),
)
_SCALE = Option("scale", "number", field="scale")
_LOWER_BOUND = Option("lower_bound", "number", field="lower_bound")
_CHUNK_SIZE = Option("chunk_size", "count", 64, field="chunk_size")
_STATE_V_FIRST = Option("state_v_first", "flag", False, "state_v_first", "state_v_first")


def _required(*names: str, differentiable: bool = False) -> tuple[ArrayArgument, ...]:
    return tuple([ArrayArgument(name, required=True, differentiable=differentiable) for name in names])


_WHOLE_ARRAYS = (
    *_required("q", "k", "v", "g", "beta", differentiable=True),
    _A_LOG,
    _DT_BIAS,
    ArrayArgument("initial_state", feature="initial_state", writable=True, differentiable=True),
    *_PACKED,
)
_HAS_INITIAL_STATE = ArrayArgument("has_initial_state", feature="has_initial_state", mask=True)
_WRITES = (
    ArrayArgument("write_indices", feature="write_indices", index=True),
    ArrayArgument("write_pool", feature="write_pool", writable=True),
)
_OUT = ArrayArgument("out", feature="out", writable=True)
_CHUNK_ARRAYS = (
    *_WHOLE_ARRAYS,
    ArrayArgument("state_indices", feature="state_pool", index=True),
    _HAS_INITIAL_STATE,
    *_WRITES,
    ArrayArgument("checkpoint_offsets", feature="checkpoint_offsets", index=True),
    ArrayArgument("checkpoint_indices", feature="checkpoint_offsets", index=True),
    _OUT,
)
_WHOLE_OPTIONS = (
    _SCALE,
    Option("output_final_state", "flag", False, "final_state", "output_final_state"),
    Option("use_qk_l2norm_in_kernel", "flag", False, "qk_l2norm", "qk_l2norm"),
    Option("use_gate_in_kernel", "flag", False, field="gate"),  # its feature is the gate's
    Option("use_beta_sigmoid_in_kernel", "flag", False, "beta_sigmoid", "beta_sigmoid"),
    Option("allow_neg_eigval", "flag", False, "neg_eigval", "neg_eigval"),
    Option("safe_gate", "flag", False, None, "safe_gate"),  # a promise about the values of g
    _LOWER_BOUND,
    _STATE_V_FIRST,
)

_POOL_OPTIONS = (
    Option("inplace_state", "flag", False, "inplace_state", "inplace_state"),
    Option("null_index", "count", None, "null_index", "null_index"),
)

_CHUNK_OPTIONS = (
    *_WHOLE_OPTIONS,
    Option("disable_recompute", "flag", False, None, "disable_recompute"),  # a hint: the same results
    Option("checkpoint_every", "count", None, "checkpoints", "checkpoint_every"),
    Option("cp", "ranks"),  # no feature: the front end serves it with any backend
    *_POOL_OPTIONS,
)

_RECURRENT_ARRAYS = (
    *_WHOLE_ARRAYS,
    ArrayArgument("state_indices", feature="state_pool", index=True),
    ArrayArgument("num_accepted_tokens", feature="accepted_tokens", index=True),
    _OUT,
    _HAS_INITIAL_STATE,
    *_WRITES,
)
_RECURRENT_OPTIONS = (
    *_WHOLE_OPTIONS,
    *_POOL_OPTIONS,
    Option("read_only_state", "flag", False, "read_only_state", "read_only_state"),
)

# --- the ops ------------------------------------------------------------------------------------------------------


def _chunk(name: str, scalar_gate: bool) -> OpDef:
    return OpDef(name, "chunk", t.ChunkInputs, _CHUNK_ARRAYS, _CHUNK_OPTIONS, t.Outputs, scalar_gate)


def _recurrent(name: str, scalar_gate: bool) -> OpDef:
    return OpDef(
        name, "recurrent", t.RecurrentInputs, _RECURRENT_ARRAYS, _RECURRENT_OPTIONS, t.Outputs, scalar_gate
    )


def _stage(
    name: str,
    inputs: type,
    arrays: tuple[ArrayArgument, ...],
    options: tuple[Option, ...],
    outputs: type | None = None,
) -> OpDef:
    return OpDef(name, "stage", inputs, (*arrays, *_PACKED), options, outputs)


OPS: dict[str, OpDef] = {
    definition.name: definition
    for definition in (
        _chunk("chunk_kda", scalar_gate=False),
        _chunk("chunk_gated_delta_rule", scalar_gate=True),
        _recurrent("fused_recurrent_kda", scalar_gate=False),
        _recurrent("fused_recurrent_gated_delta_rule", scalar_gate=True),
        OpDef(
            "kda_gate",
            "gate",
            t.GateInputs,
            (*_required("g", differentiable=True), _A_LOG, _DT_BIAS),
            (_LOWER_BOUND,),
        ),
        _stage(
            "kda_chunk_gate",
            t.ChunkGateInputs,
            (*_required("g"), _A_LOG, _DT_BIAS),
            (_LOWER_BOUND, _CHUNK_SIZE),
        ),
        _stage(
            "kda_chunk_intra",
            t.IntraInputs,
            _required("q", "k", "gc", "beta"),
            (_SCALE, _CHUNK_SIZE),
            t.IntraOutputs,
        ),
        _stage(
            "kda_recompute_w_u",
            t.RecomputeInputs,
            (*_required("k", "v", "beta", "gc", "Akk"), ArrayArgument("q", feature="q")),
            (_CHUNK_SIZE,),
            t.RecomputeOutputs,
        ),
        _stage(
            "delta_rule_chunk_state",
            t.ChunkStateInputs,
            (*_required("kg", "w", "u", "gc"), ArrayArgument("initial_state", feature="initial_state")),
            (_CHUNK_SIZE, _STATE_V_FIRST),
            t.ChunkStateOutputs,
        ),
        _stage(
            "kda_chunk_output",
            t.ChunkOutputInputs,
            _required("q", "v_new", "gc", "Aqk", "h"),
            (_SCALE, _CHUNK_SIZE),
        ),
    )
}
"""Every op by its public name."""

FEATURES: frozenset[str] = frozenset().union(*[definition.features for definition in OPS.values()])
"""Every feature that a call of any op can use."""

# --- families of features, for what backends list in OpImpl.serves --------------------------------------------------
# Written out, not derived: a backend must not be given an option that was added to an op after it was written.

GATE_FEATURES = frozenset({"gate.bounded", "gate.unbounded"})
"""The gate computed in the call."""
SEQUENCE_FEATURES = GATE_FEATURES | {
    "beta_sigmoid",
    "final_state",
    "grouped_value_heads",
    "initial_state",
    "neg_eigval",
    "packed",
    "qk_l2norm",
    "state_v_first",
}
"""Of the chunked and the recurrent ops: what a call for training or for a plain forward may use."""
POOL_FEATURES = frozenset(
    {"has_initial_state", "inplace_state", "null_index", "state_pool", "write_indices", "write_pool"}
)
"""Of the chunked and the recurrent ops: states in the rows of a pool, as serving engines hold them."""
CHECKPOINT_FEATURES = frozenset({"checkpoint_offsets", "checkpoints"})
"""Of the chunked ops: states inside a sequence."""
RECURRENT_FEATURES = frozenset({"accepted_tokens", "read_only_state"})
"""Of the recurrent ops: candidate tokens."""
STAGE_FEATURES: dict[str, frozenset[str]] = {
    "kda_chunk_gate": GATE_FEATURES | {"packed"},
    "kda_chunk_intra": frozenset({"grouped_value_heads", "packed"}),
    "kda_recompute_w_u": frozenset({"grouped_value_heads", "packed", "q"}),
    "delta_rule_chunk_state": frozenset({"initial_state", "packed", "state_v_first"}),
    "kda_chunk_output": frozenset({"grouped_value_heads", "packed"}),
}
"""Of each stage."""

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
