"""The arguments of the ops: arrays and options, each with its default, its feature and its description.

To add one: CONTRIBUTING.md, "Adding an option".
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from kdacore.ops.definition import ArrayArgument, Option

A_LOG = ArrayArgument(
    "A_log",
    differentiable=True,
    doc="``[HV]`` float32 (float64 is taken too). Needed by the unbounded gate, optional (zeros) with "
    "``lower_bound``.",
)
DT_BIAS = ArrayArgument(
    "dt_bias",
    differentiable=True,
    doc="``[HV, K]`` or ``[HV*K]``, any float dtype, added to the raw gate input.",
)
PACKED = (
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
        doc="``[N+1]`` int32 or int64: the same values on the host (NumPy, or the kind of the others), "
        "for backends that plan "
        "with them.",
    ),
)
SCALE = Option(
    "scale",
    "number",
    field="scale",
    doc="factor on the output; ``K ** -0.5`` when None. 0, or 1e-30 to 1e30 in size.",
)
LOWER_BOUND = Option(
    "lower_bound",
    "number",
    field="lower_bound",
    doc="the bound, in ``[-5, 0)`` with ``safe_gate``, else any negative number of 1e-30 to 1e30 in size.",
)
CHUNK_SIZE = Option("chunk_size", "count", 64, field="chunk_size")
STATE_V_FIRST = Option(
    "state_v_first", "flag", False, "state_v_first", "state_v_first", doc="states are ``[N, HV, V, K]``."
)


def required(*names: str, differentiable: bool = False) -> tuple[ArrayArgument, ...]:
    return tuple([ArrayArgument(name, required=True, differentiable=differentiable) for name in names])


Argument = TypeVar("Argument", ArrayArgument, Option)


def described(arguments: tuple[Argument, ...], **docs: str) -> tuple[Argument, ...]:
    """The same arguments, those named with another description."""
    return tuple([replace(a, doc=docs[a.name]) if a.name in docs else a for a in arguments])


_WHOLE_ARRAYS = (
    ArrayArgument("q", required=True, differentiable=True),
    ArrayArgument(
        "k",
        required=True,
        differentiable=True,
        doc="``[B, T, H, K]``, float32, bfloat16 or float16, one dtype; float64 on the reference backend.",
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
        doc="``[B, T, HV, K]``, float32, bfloat16 or float16; float64 in calls of float64. The log decay "
        "(natural log, <= 0), "
        "or the raw gate input with ``use_gate_in_kernel``.",
    ),
    ArrayArgument(
        "beta",
        required=True,
        differentiable=True,
        doc="``[B, T, HV]``, float32, bfloat16 or float16; float64 in calls of float64. In (0, 1), or logits with "
        "``use_beta_sigmoid_in_kernel``.",
    ),
    A_LOG,
    DT_BIAS,
    ArrayArgument(
        "initial_state",
        feature="initial_state",
        writable=True,
        differentiable=True,
        doc="``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), float32, bfloat16 or "
        "float16; float64 in calls of float64. Zeros when None.",
    ),
    *PACKED,
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
        doc="``[P', HV, K, V]``, the dtypes of ``initial_state``, the same where both are given: the pool "
        "that is written, ``initial_state`` by "
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
_RECORD_PARTS = (
    ArrayArgument("record_update", feature="records", writable=True, part_of="records"),
    ArrayArgument("record_key", feature="records", writable=True, part_of="records"),
    ArrayArgument(
        "record_decay",
        feature="records",
        writable=True,
        part_of="records",
        doc="``(update [R, n, HV, V], key [R, n, H, K], decay [R, n, HV, K])``, float32 (float64 in calls "
        "of float64), any strides; "
        "messages name them ``record_update``, ``record_key`` and ``record_decay``. What each token of "
        "a call does to the state is written here, ``n`` tokens at most, and the state stays as it was "
        "before them. Needs ``state_indices [N]``, ``record_indices`` and ``inplace_state``.",
    ),
)
_RECORDS = (
    *_RECORD_PARTS,
    ArrayArgument(
        "record_indices",
        feature="records",
        index=True,
        doc="``[N]`` int32 or int64: the row of the records of each sequence. Where it is negative, or "
        "``null_index``, the sequence has none: it decodes and writes its state as without records.",
    ),
    ArrayArgument(
        "num_replayed",
        feature="records",
        index=True,
        doc="``[N]`` int32 or int64, 0 to n: how many records of its row, the first ones, precede this "
        "call (candidates that were accepted); all 0 when None. They are applied to the state first, "
        "which is rounded to the pool's dtype and written. 0 after a prefill, a plain decode or a "
        ":func:`commit_records`.",
    ),
)
CHUNK_ARRAYS = (
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
    SCALE,
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
    LOWER_BOUND,
    STATE_V_FIRST,
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

CHUNK_OPTIONS = (
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

RECURRENT_ARRAYS = described(
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
        *_RECORDS,
    ),
    initial_state="the states ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), or with "
    "``state_indices`` a pool ``[P, HV, K, V]`` whose rows may have any stride; float32, bfloat16 or "
    "float16; float64 in calls of float64.",
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
RECURRENT_OPTIONS = described(
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

_CONV_STATE = ArrayArgument(
    "conv_state",
    feature="conv",
    writable=True,
    doc="the pool ``[P, D, L]`` of x before the convolution, dtype of x, any strides, ``L >= w - 1``: "
    "columns 0 to w - 2 hold the last tokens of each sequence, oldest first. Written with "
    "``inplace_state``. Candidates that write their states, or records, need ``L >= w + T - 2``, unless "
    "``conv_windows`` is given: their tokens stay in the row, and the next call reads from column "
    "``num_accepted_tokens - 1``, or ``num_replayed - 1``.",
)
_CONV_INDICES = ArrayArgument(
    "conv_indices",
    feature="conv_indices",
    index=True,
    doc="``[N]`` int32 or int64 rows of ``conv_state``; ``state_indices``, or its first column, by default. An "
    "entry that names no slot reads zeros and writes nothing.",
)
_CONV_WINDOWS = ArrayArgument(
    "conv_windows",
    feature="conv_windows",
    writable=True,
    doc="``[R, T, w - 1, D]``, dtype of x: receives the window after each candidate, and ``conv_state`` stays "
    "but for what is replayed. Row ``record_indices[n]`` for sequence n, row n without. A next call that "
    "gives ``num_accepted_tokens`` or ``num_replayed`` reads its window here.",
)
DECODE_ARRAYS = (
    ArrayArgument(
        "x",
        required=True,
        doc="``[B, T, D]``, float32, bfloat16 or float16; float64 on the reference backend: the channels of q, "
        "k and v in that order, ``D = 2*H*K + HV*V``, before the convolution. 1 to 16 tokens a sequence. "
        "HV, K and V are those of ``initial_state``, and H follows.",
    ),
    *[a for a in _WHOLE_ARRAYS if a.name in ("g", "beta")],
    ArrayArgument(
        "initial_state",
        required=True,
        feature=None,
        writable=True,
        doc="the states ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), or with "
        "``state_indices`` a pool ``[P, HV, K, V]`` whose rows may have any stride; float32, bfloat16 or "
        "float16; float64 in calls of float64.",
    ),
    A_LOG,
    DT_BIAS,
    ArrayArgument(
        "conv_weight",
        feature="conv",
        doc="``[D, w]``, w of 2 to 4, float32, bfloat16 or float16; float64 in calls of float64: a causal "
        "convolution of each channel, then SiLU. None: x "
        "comes convolved, and there is no ``conv_state``.",
    ),
    ArrayArgument(
        "conv_bias",
        feature="conv_bias",
        doc="``[D]``, float32, bfloat16 or float16; float64 in calls of float64, added before the SiLU.",
    ),
    _CONV_STATE,
    _CONV_INDICES,
    _CONV_WINDOWS,
    ArrayArgument(
        "z",
        feature="output_gate",
        doc="``[B, T, HV, V]``, float32, bfloat16 or float16; float64 in calls of float64: the normalised "
        "output is multiplied by its activation. Needs "
        "``norm_weight``.",
    ),
    ArrayArgument(
        "norm_weight",
        feature="output_norm",
        doc="``[V]`` or ``[HV, V]``, float32, bfloat16 or float16; float64 in calls of float64: o becomes "
        "``o / sqrt(mean(o*o) + norm_eps) * "
        "norm_weight``, the mean over V. None: o as it is.",
    ),
    *[
        a
        for a in RECURRENT_ARRAYS
        if a.name not in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    ],
)
DECODE_ARRAYS = described(
    tuple([replace(a, differentiable=False) for a in DECODE_ARRAYS]),
    out="``[B, T, HV, V]`` in x's dtype, written and returned as ``o``. Neither it nor what else the call writes "
    "may overlap itself or another argument.",
)


def decode_options(activation: str) -> tuple[Option, ...]:
    """Options of a fused decode op. ``activation``: of z by default."""
    return (
        *RECURRENT_OPTIONS,
        Option(
            "norm_eps",
            "number",
            1e-5,
            field="norm_eps",
            doc="added to the mean square in the norm; 1e-30 to 1e30. Only with ``norm_weight``.",
        ),
        Option(
            "norm_activation",
            "choice",
            activation,
            field="norm_activation",
            choices=("sigmoid", "silu"),
            doc="``sigmoid`` or ``silu`` of z. Only with ``z``.",
        ),
    )


COMMIT_ARRAYS = (
    ArrayArgument(
        "initial_state",
        required=True,
        writable=True,
        doc="the pool ``[P, HV, K, V]`` (``[P, HV, V, K]`` with ``state_v_first``), rows of any stride, "
        "any float dtype.",
    ),
    ArrayArgument(
        "state_indices",
        required=True,
        index=True,
        doc="``[N]`` int32 or int64: the row of each state. A negative index, or ``null_index``, is no "
        "slot: nothing is written for it.",
    ),
    *[
        replace(
            a,
            required=True,
            feature=None,
            writable=False,
            doc=a.doc
            and "``(update [R, n, HV, V], key [R, n, H, K], decay [R, n, HV, K])``, the last ``[R, n, HV]`` "
            "for one decay a head, all float32 or all float64: as calls with ``records`` wrote them.",
        )
        for a in _RECORD_PARTS
    ],
    ArrayArgument(
        "record_indices",
        required=True,
        index=True,
        doc="``[N]`` int32 or int64: the row of the records of each state. Nothing is written where it "
        "is negative, or ``null_index``.",
    ),
    ArrayArgument(
        "num_replayed",
        required=True,
        index=True,
        doc="``[N]`` int32 or int64, 0 to n: how many records of its row are applied, from the first on.",
    ),
    ArrayArgument(
        "write_indices",
        feature="write_indices",
        index=True,
        doc="``[N]`` int32 or int64 rows that are written, ``state_indices`` by default; with 0 records "
        "too. Entries that name no slot write nothing.",
    ),
    replace(
        _CONV_STATE,
        doc="``[P, D, L]``, any float dtype: the pool of convolution states, where the records are those "
        "of a fused decode op. "
        "Without ``conv_windows`` each row is moved by ``num_replayed - 1`` columns to the left.",
    ),
    replace(
        _CONV_INDICES, doc="``[N]`` int32 or int64 rows of ``conv_state``; ``state_indices`` by default."
    ),
    replace(
        _CONV_WINDOWS,
        writable=False,
        doc="``[R, T, w - 1, D]``, dtype of ``conv_state``: the windows that the calls have left; the one "
        "after the last record that is "
        "applied goes to columns 0 to w - 2 of ``conv_state``.",
    ),
)
COMMIT_OPTIONS = (STATE_V_FIRST, *[o for o in _POOL_OPTIONS if o.name == "null_index"])
