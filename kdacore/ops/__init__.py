"""The ops as data: which arrays each takes, which options, and which of them it can differentiate."""

from __future__ import annotations

from dataclasses import dataclass

from kdacore import types as t

_SHARED_OPTIONS = (
    "scale",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "lower_bound",
    "state_v_first",
)
CHUNK_OPTIONS = (*_SHARED_OPTIONS, "disable_recompute", "checkpoint_every", "cp")
RECURRENT_OPTIONS = (*_SHARED_OPTIONS, "inplace_state", "read_only_state")
FLAGS = frozenset(
    {
        "output_final_state",
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "safe_gate",
        "state_v_first",
        "disable_recompute",
        "inplace_state",
        "read_only_state",
    }
)


@dataclass(frozen=True, slots=True)
class OpDef:
    """One op: the tuple its arrays travel in, and the names of its options in their fixed order."""

    name: str
    inputs: type
    options: tuple[str, ...]
    family: str
    """``chunk``, ``recurrent``, ``gate`` or ``stage``."""
    scalar_gate: bool = False
    outputs: type | None = t.Outputs
    """What ``forward`` returns; None: one array."""

    @property
    def arrays(self) -> tuple[str, ...]:
        fields: tuple[str, ...] = self.inputs._fields  # type: ignore[attr-defined]
        return fields


_DEFS = (
    OpDef("chunk_kda", t.ChunkInputs, CHUNK_OPTIONS, "chunk"),
    OpDef("chunk_gated_delta_rule", t.ChunkInputs, CHUNK_OPTIONS, "chunk", scalar_gate=True),
    OpDef("fused_recurrent_kda", t.RecurrentInputs, RECURRENT_OPTIONS, "recurrent"),
    OpDef(
        "fused_recurrent_gated_delta_rule",
        t.RecurrentInputs,
        RECURRENT_OPTIONS,
        "recurrent",
        scalar_gate=True,
    ),
    OpDef("kda_gate", t.GateInputs, ("lower_bound",), "gate", outputs=None),
    OpDef("kda_chunk_gate", t.ChunkGateInputs, ("lower_bound", "chunk_size"), "stage", outputs=None),
    OpDef("kda_chunk_intra", t.IntraInputs, ("scale", "chunk_size"), "stage", outputs=t.IntraOutputs),
    OpDef("kda_recompute_w_u", t.RecomputeInputs, ("chunk_size",), "stage", outputs=t.RecomputeOutputs),
    OpDef(
        "delta_rule_chunk_state",
        t.ChunkStateInputs,
        ("chunk_size", "state_v_first"),
        "stage",
        outputs=t.ChunkStateOutputs,
    ),
    OpDef("kda_chunk_output", t.ChunkOutputInputs, ("scale", "chunk_size"), "stage", outputs=None),
)

OPS: dict[str, OpDef] = {d.name: d for d in _DEFS}
STAGES: tuple[str, ...] = tuple(d.name for d in _DEFS if d.family == "stage")

STATE_ARGUMENTS = frozenset({"initial_state", "final_state"})
HOST_ARGUMENTS = frozenset({"cu_seqlens_cpu"})
"""Arguments that live on the host whatever the device of the others."""
INDEX_ARGUMENTS = frozenset({"cu_seqlens", "cu_seqlens_cpu", "state_indices", "num_accepted_tokens"})
WRITABLE_ARGUMENTS = frozenset({"initial_state", "out"})
"""Arguments that a call may be asked to write: their strides are always part of what it is recognised by."""
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
