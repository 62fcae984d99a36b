"""Families of features, for what backends list in :attr:`kdacore.types.OpImpl.serves`.

They are written out, not derived from the ops: a backend must not be given an option that was added to an op after the
backend was written.
"""

from __future__ import annotations

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
