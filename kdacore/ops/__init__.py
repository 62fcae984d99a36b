"""The ops: one definition each. Everything that says what arguments an op takes derives from these.

``python -m codegen.public_api`` writes the public functions from them. To add an option to an op: CONTRIBUTING.md,
"Adding an option".
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

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

_A_LOG = ArrayArgument(
    "A_log",
    differentiable=True,
    doc="``[HV]`` float32. Needed by the unbounded gate, optional (zeros) with ``lower_bound``.",
)
_DT_BIAS = ArrayArgument(
    "dt_bias", differentiable=True, doc="``[HV, K]`` or ``[HV*K]``, added to the raw gate input."
)
_PACKED = (
    ArrayArgument(
        "cu_seqlens",
        feature="packed",
        index=True,
        doc="``[N+1]`` int32 or int64 offsets of packed sequences, from 0 to at most T; then ``B == "
        "1``. Sequences may be empty. Tokens from ``cu_seqlens[-1]`` on are padding and belong to "
        "no sequence: they are not read, their rows of a new ``o`` and their gradients are zero, "
        "and ``out`` is not written there.",
    ),
    ArrayArgument(
        "cu_seqlens_cpu",
        host=True,
        index=True,
        doc="the same values on the host (NumPy, or the kind of the others), for backends that plan "
        "with them.",
    ),
)
_SCALE = Option(
    "scale",
    "number",
    field="scale",
    doc="factor on the output; ``K ** -0.5`` when None. 0, or 1e-30 to 1e30 in size.",
)
_LOWER_BOUND = Option(
    "lower_bound",
    "number",
    field="lower_bound",
    doc="the bound, in ``[-5, 0)`` with ``safe_gate``, else any negative number of 1e-30 to 1e30 in size.",
)
_CHUNK_SIZE = Option("chunk_size", "count", 64, field="chunk_size")
_STATE_V_FIRST = Option(
    "state_v_first", "flag", False, "state_v_first", "state_v_first", doc="states are ``[N, HV, V, K]``."
)


def _required(*names: str, differentiable: bool = False) -> tuple[ArrayArgument, ...]:
    return tuple([ArrayArgument(name, required=True, differentiable=differentiable) for name in names])


Argument = TypeVar("Argument", ArrayArgument, Option)


def _described(arguments: tuple[Argument, ...], **docs: str) -> tuple[Argument, ...]:
    """The same arguments, those named with another description."""
    return tuple([replace(a, doc=docs[a.name]) if a.name in docs else a for a in arguments])


_WHOLE_ARRAYS = (
    ArrayArgument("q", required=True, differentiable=True),
    ArrayArgument(
        "k",
        required=True,
        differentiable=True,
        doc="``[B, T, H, K]``, float32, bfloat16 or float16 (float64 on the reference backend), one dtype.",
    ),
    ArrayArgument(
        "v",
        required=True,
        differentiable=True,
        doc="``[B, T, HV, V]``, dtype of q. ``HV`` is a multiple of ``H``; value head i reads head "
        "``i // (HV // H)`` of q and k.",
    ),
    ArrayArgument(
        "g",
        required=True,
        differentiable=True,
        doc="``[B, T, HV, K]``, any float dtype. The log decay (natural log, <= 0), or the raw gate "
        "input with ``use_gate_in_kernel``.",
    ),
    ArrayArgument(
        "beta",
        required=True,
        differentiable=True,
        doc="``[B, T, HV]``, any float dtype. In (0, 1), or logits with ``use_beta_sigmoid_in_kernel``.",
    ),
    _A_LOG,
    _DT_BIAS,
    ArrayArgument(
        "initial_state",
        feature="initial_state",
        writable=True,
        differentiable=True,
        doc="``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), float32 or bfloat16; zeros "
        "when None.",
    ),
    *_PACKED,
)
_STATE_INDICES = ArrayArgument(
    "state_indices",
    feature="state_pool",
    index=True,
    doc="``[N]`` int32 or int64: ``initial_state`` is a pool ``[P, HV, K, V]`` whose rows may "
    "have any stride, and sequence n starts from this row. A negative index, or "
    "``null_index``, is no slot: the sequence is padding; its ``o`` and final state are zero "
    "and nothing is written for it.",
)
_HAS_INITIAL_STATE = ArrayArgument(
    "has_initial_state",
    feature="has_initial_state",
    mask=True,
    doc="``[N]`` bool; sequences where it is False start from zeros, whatever their row holds.",
)
_WRITES = (
    ArrayArgument(
        "write_indices",
        feature="write_indices",
        index=True,
        doc="``[N]`` int32 or int64 rows that are written, ``state_indices`` by default. Entries that "
        "name no slot write nothing. A row that one sequence writes must not be read or written "
        "by another.",
    ),
    ArrayArgument(
        "write_pool",
        feature="write_pool",
        writable=True,
        doc="``[P', HV, K, V]``, dtype of the states: the pool that is written, ``initial_state`` by "
        "default.",
    ),
)
_OUT = ArrayArgument(
    "out",
    feature="out",
    writable=True,
    doc="``[B, T, HV, V]`` in v's dtype, written and returned as ``o``. Neither it nor a pool "
    "that is written may overlap itself or another argument.",
)
_CHUNK_ARRAYS = (
    *_WHOLE_ARRAYS,
    _STATE_INDICES,
    _HAS_INITIAL_STATE,
    *_WRITES,
    ArrayArgument(
        "checkpoint_offsets",
        feature="checkpoint_offsets",
        index=True,
        doc="``[C]`` int32 or int64 positions of tokens in the pack (``B == 1``), each a multiple of "
        "16 from the start of the sequence that holds it: the state before that token is written "
        "to the pool, with ``inplace_state``.",
    ),
    ArrayArgument(
        "checkpoint_indices",
        feature="checkpoint_offsets",
        index=True,
        doc="``[C]`` int32 or int64 rows for these states; an entry that names no slot writes nothing.",
    ),
    _OUT,
)
_WHOLE_OPTIONS = (
    _SCALE,
    Option(
        "output_final_state",
        "flag",
        False,
        "final_state",
        "output_final_state",
        doc="return the state after the last token of each sequence.",
    ),
    Option(
        "use_qk_l2norm_in_kernel",
        "flag",
        False,
        "qk_l2norm",
        "qk_l2norm",
        doc="replace q and k by ``x / sqrt(sum(x*x) + 1e-6)`` over K.",
    ),
    # Its feature is the gate's.
    Option(
        "use_gate_in_kernel",
        "flag",
        False,
        field="gate",
        doc="compute the log decay from ``x = g + dt_bias``: ``-exp(A_log) * softplus(x)``, or "
        "``lower_bound * sigmoid(exp(A_log) * x)`` when ``lower_bound`` is given.",
    ),
    Option(
        "use_beta_sigmoid_in_kernel",
        "flag",
        False,
        "beta_sigmoid",
        "beta_sigmoid",
        doc="apply ``sigmoid`` to beta, in float32.",
    ),
    Option(
        "allow_neg_eigval", "flag", False, "neg_eigval", "neg_eigval", doc="``2 * sigmoid(beta)`` instead."
    ),
    # A promise about the values of g.
    Option(
        "safe_gate",
        "flag",
        False,
        None,
        "safe_gate",
        doc="promise that every log decay lies in ``[lower_bound, 0]``; needs ``lower_bound``. A "
        "property of the model, not a speed switch.",
    ),
    _LOWER_BOUND,
    _STATE_V_FIRST,
)

_POOL_OPTIONS = (
    Option(
        "inplace_state",
        "flag",
        False,
        "inplace_state",
        "inplace_state",
        doc="write final states into the pool: into row ``write_indices[n]`` of ``write_pool``. Rows "
        "not named stay bitwise as they were. JAX arrays cannot be written: there the updated "
        "pool is returned as the final state.",
    ),
    Option(
        "null_index",
        "count",
        None,
        "null_index",
        "null_index",
        doc="a row number, besides the negative ones, that names no slot.",
    ),
)

_CHUNK_OPTIONS = (
    *_WHOLE_OPTIONS,
    # A hint: the same results.
    Option(
        "disable_recompute",
        "flag",
        False,
        None,
        "disable_recompute",
        doc="a backend may keep what its backward would otherwise recompute, in more memory: the same "
        "results within the same bounds, and faster where that pays. Of kdacore's own backends "
        "``pallas`` does, and ``cuda`` in eager torch calls with 13 or more sequences times value "
        "heads (2084 bytes a token and value head; for when that pays see docs/guide/calling.md). "
        "For the others it changes nothing.",
    ),
    Option(
        "checkpoint_every",
        "count",
        None,
        "checkpoints",
        "checkpoint_every",
        doc="also return the state at the start of every block of this many tokens, a multiple of 64.",
    ),
    # No feature: the front end serves it with any backend.
    Option(
        "cp",
        "ranks",
        doc="the ranks that a row is split over, each of which makes this call with its own T tokens: "
        "rank r has tokens ``[r*T, (r+1)*T)`` of the whole row. A ``torch.distributed`` process "
        "group or a ``DeviceMesh`` of one dimension; with JAX, inside ``shard_map``, the name of "
        "a mesh axis. Then ``cu_seqlens`` are offsets over the whole row, the same on every rank; "
        "``initial_state`` and ``final_state`` are those of all N sequences on every rank; and "
        "gradients of what every rank holds (``initial_state``, ``A_log``, ``dt_bias``) are each "
        "rank's share of a sum. See docs/guide/long-context.md.",
    ),
    *_POOL_OPTIONS,
)

_RECURRENT_ARRAYS = _described(
    (
        *_WHOLE_ARRAYS,
        _STATE_INDICES,
        ArrayArgument(
            "num_accepted_tokens",
            feature="accepted_tokens",
            index=True,
            doc="``[N]`` int32 or int64, for speculative decoding: sequence n starts from the state in "
            "row ``state_indices[n, num_accepted_tokens[n] - 1]`` (from zeros for 0).",
        ),
        _OUT,
        _HAS_INITIAL_STATE,
        *_WRITES,
    ),
    initial_state="the states ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), or with "
    "``state_indices`` a pool ``[P, HV, K, V]`` whose rows may have any stride.",
    state_indices="int32 or int64. ``[N]``: the pool row of each sequence. ``[N, W]`` with "
    "``num_accepted_tokens``: a row for each candidate token. A sequence that would start "
    "from a negative index, or from ``null_index``, has no slot and is padding: its ``o`` and "
    "final state are zero and nothing is written for it.",
    write_indices="int32 or int64 rows that ``inplace_state`` writes, ``state_indices`` by default. "
    "``[N]``: the final state of each sequence. ``[N, W]``: the state after token t goes to "
    "row ``write_indices[n, t]``. Entries that name no slot write nothing. A row that one "
    "sequence writes must not be read or written by another.",
    out="``[B, T, HV, V]`` in v's dtype, written and returned as ``o``. Neither it nor a pool "
    "written in place may overlap itself or another argument.",
)
_RECURRENT_OPTIONS = _described(
    (
        *_WHOLE_OPTIONS,
        *_POOL_OPTIONS,
        Option(
            "read_only_state",
            "flag",
            False,
            "read_only_state",
            "read_only_state",
            doc="compute outputs for 1 to 16 candidate tokens and write no state anywhere.",
        ),
    ),
    inplace_state="write final states into the pool; rows not named stay bitwise as they were. JAX arrays "
    "cannot be written: there the updated pool is returned as the final state.",
)

# --- the ops ------------------------------------------------------------------------------------------------------


_ONE_GATE_A_HEAD = {
    "g": "``[B, T, HV]``: one log decay (natural log, <= 0) for each token and head, or its raw gate input.",
    "dt_bias": "``[HV]``.",
}


def _chunk(name: str, scalar_gate: bool) -> OpDef:
    arrays = _described(_CHUNK_ARRAYS, **_ONE_GATE_A_HEAD) if scalar_gate else _CHUNK_ARRAYS
    return OpDef(name, "chunk", t.ChunkInputs, arrays, _CHUNK_OPTIONS, t.Outputs, scalar_gate)


def _recurrent(name: str, scalar_gate: bool) -> OpDef:
    arrays = _described(_RECURRENT_ARRAYS, **_ONE_GATE_A_HEAD) if scalar_gate else _RECURRENT_ARRAYS
    return OpDef(name, "recurrent", t.RecurrentInputs, arrays, _RECURRENT_OPTIONS, t.Outputs, scalar_gate)


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
            _described(
                (*_required("g", differentiable=True), _A_LOG, _DT_BIAS),
                g="``[B, T, HV, K]``, or ``[B, T, HV]`` for one gate per head; any float dtype.",
                A_log="``[HV]`` float32; needed without ``lower_bound``.",
                dt_bias="``[HV, K]`` or ``[HV*K]`` (``[HV]`` for one gate per head).",
            ),
            _described(
                (_LOWER_BOUND,),
                lower_bound="a negative number of 1e-30 to 1e30 in size, or None for the unbounded gate.",
            ),
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
"""What calls of the chunked and the recurrent ops may use for training or a plain forward."""
POOL_FEATURES = frozenset(
    {"has_initial_state", "inplace_state", "null_index", "state_pool", "write_indices", "write_pool"}
)
"""States in the rows of a pool, as serving engines hold them; in the chunked and the recurrent ops."""
CHECKPOINT_FEATURES = frozenset({"checkpoint_offsets", "checkpoints"})
"""States inside a sequence; in the chunked ops."""
RECURRENT_FEATURES = frozenset({"accepted_tokens", "read_only_state"})
"""Candidate tokens; in the recurrent ops."""
STAGE_FEATURES: dict[str, frozenset[str]] = {
    "kda_chunk_gate": GATE_FEATURES | {"packed"},
    "kda_chunk_intra": frozenset({"grouped_value_heads", "packed"}),
    "kda_recompute_w_u": frozenset({"grouped_value_heads", "packed", "q"}),
    "delta_rule_chunk_state": frozenset({"initial_state", "packed", "state_v_first"}),
    "kda_chunk_output": frozenset({"grouped_value_heads", "packed"}),
}
"""The features of each stage."""

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
