"""What is varied, as data: each entry changes the plainest served call in one way and says where it runs.

``where`` of a variation, in the quick suite:
    ``everywhere``  each array kind and dtype
    ``kind``        each array kind, its first dtype
    ``dtype``       the first kind, each dtype
    ``once``        the first kind and dtype
    ``full``        nowhere; the full suite runs every variation everywhere
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kdacore.calls.pools import POOLS
from kdacore.ops import OPS
from kdacore.testing.cases import MODEL, UNBOUNDED_MODEL

Where = Literal["everywhere", "kind", "dtype", "once", "full"]


@dataclass(frozen=True)
class Variation:
    """One change of the plainest call."""

    note: str
    where: Where = "once"
    check: str = "accuracy"
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Sizes to change; ``"V": "2K"`` doubles the key width."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the public call to change; None takes one away."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the case."""


def _short(variations: list[Variation]) -> list[Variation]:
    """Those that are served by a step of decoding: the forward alone, of few tokens a sequence."""
    found = []
    for v in variations:
        lengths = v.shape.get("lengths", ())
        tokens = max(lengths, default=v.shape.get("T", 1))
        if v.check == "accuracy" and tokens <= 16 and "tiny_rows" not in v.fields:
            found.append(v)
    return found


def _v(note: str, where: Where = "once", check: str = "accuracy", **rest: Any) -> Variation:
    """Variation with fields of the case as keywords beside ``shape`` and ``options``."""
    shape, options = rest.pop("shape", {}), rest.pop("options", {})
    return Variation(note, where, check, shape, options, rest)


def _both(note: str, where: Where = "once", gradients: Where = "once", **rest: Any) -> list[Variation]:
    """The forward call alone, and the differentiable one."""
    return [_v(note, where, **rest), _v(note, gradients, "gradients", **rest)]


MIXED_LENGTHS = (0, 1, 15, 16, 17, 0, 63, 64, 65, 0)
"""The contract's lengths, with empty sequences first, last and between."""
HARD: dict[str, Any] = {"factor": 2.0}
"""Twice the bounds: the contract's hard cases."""

_LOG: Mapping[str, Any] = {"use_gate_in_kernel": None, "safe_gate": None, "lower_bound": None}
_SOFTPLUS = {**_LOG, "use_gate_in_kernel": True}
_SIGMOID = {**_SOFTPLUS, "lower_bound": -5.0}
_SAFE = {**_LOG, "safe_gate": True, "lower_bound": -5.0}
_UNBOUNDED: Mapping[str, Any] = {**UNBOUNDED_MODEL, "safe_gate": None, "lower_bound": None}
_PLAIN_BETA = {"use_beta_sigmoid_in_kernel": None, "allow_neg_eigval": None}

_LONGER = {"T": 70}
"""On a handful of tokens with collinear keys the gradient of a scalar gate all but cancels: no fair test."""
_ENDS = {"T": 70, "HV": 4}
_ENDS_PACK = {"lengths": (17, 0, 1, 40), "padding": 5, "HV": 4, "K": 20}
"""Heads for each ``A_log`` of the gates at the ends of float32; lengths that fill no chunk."""

_GATES = [
    *_both("init_gates", gradients="full", gates="init", **HARD),
    *_both("slow_gates", gates="slow", **HARD),
    *_both("zero_gates", gates="zero", **HARD),
    *_both("floor_gates", gates="floor", **HARD),
    *_both("mixed_gates", "dtype", gates="mixed", options=_LOG, **HARD),
    *_both("mixed_softplus", gates="mixed", options=_SOFTPLUS, **HARD),
    *_both("mixed_sigmoid", gradients="full", gates="mixed", options=_SIGMOID, **HARD),
    *_both("collinear", "dtype", collinear=True, gates="slow", shape=_LONGER, initial_state=True, **HARD),
    *_both("collinear_init", "full", "full", collinear=True, gates="init", shape=_LONGER, **HARD),
    *_both("log_gate", "full", "full", options=_LOG),
    *_both("softplus_gate", options=_SOFTPLUS),
    *_both("sigmoid_gate", options=_SIGMOID),
    *_both("sigmoid_gate_no_A_log", options=_SIGMOID, A_log=False),
    *_both("safe_log_gate", gradients="full", options=_SAFE),
    *_both("softplus_flat_bias", gradients="full", options=_SOFTPLUS, dt_bias="flat"),
    *_both("softplus_no_bias", "full", "full", options=_SOFTPLUS, dt_bias=""),
    *_both("softplus_init", gradients="full", options=_SOFTPLUS, gates="init", **HARD),
    *_both("lower_bound_-1", "full", "full", options={**_SIGMOID, "lower_bound": -1.0}),
    *_both("still_softplus", gates="still", options=_SOFTPLUS, shape=_ENDS, **HARD),
    *_both("still_sigmoid", gates="still", options=_SIGMOID, shape=_ENDS, **HARD),
    *_both("steep_softplus", gates="steep", options=_SOFTPLUS, shape=_ENDS, **HARD),
    *_both("steep_sigmoid", gates="steep", options=_SIGMOID, shape=_ENDS, **HARD),
    _v("cliff_sigmoid", "once", "gradients", gates="cliff", options=_SIGMOID, shape=_ENDS, **HARD),
    *_both("steep_log", gradients="full", gates="steep", options=_LOG, shape=_ENDS, **HARD),
    *_both("still_pack", gradients="full", gates="still", options=_SIGMOID, shape=_ENDS_PACK, **HARD),
    *_both("steep_pack", gradients="full", gates="steep", options=_SOFTPLUS, shape=_ENDS_PACK, **HARD),
]
_NORMS = [
    *_both("l2norm", options={"use_qk_l2norm_in_kernel": True}),
    *_both("l2norm_tiny_rows", options={"use_qk_l2norm_in_kernel": True}, tiny_rows=True),
    *_both("no_l2norm", "full", "full", options={"use_qk_l2norm_in_kernel": None}),
    *_both("beta_sigmoid", options={**_PLAIN_BETA, "use_beta_sigmoid_in_kernel": True}),
    *_both("neg_eigval", options={"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}),
    *_both("model", "kind", "kind", options=MODEL),
    *_both("unbounded_model", options=_UNBOUNDED),
    *_both("scale", gradients="full", options={"scale": 0.7}),
    *_both("low_precision_gates", gate_dtype="bfloat16", beta_dtype="bfloat16", bias_dtype="bfloat16"),
    *_both("half_gates", "full", "full", gate_dtype="float16", beta_dtype="float16"),
]
_LAYOUTS = [
    *_both("padded", layout="padded", initial_state=True),
    *_both("stepped", gradients="full", layout="stepped", initial_state=True),
    *_both("transposed", layout="transposed", initial_state=True),
]
_STATES = [
    *_both("initial_state", initial_state=True),
    *_both("v_first", initial_state=True, shape={"V": "2K"}, options={"state_v_first": True}),
    *_both("bf16_state", gradients="full", initial_state=True, state_dtype="bfloat16"),
    *_both("f16_state", "full", "full", initial_state=True, state_dtype="float16"),
    _v("no_final_state", options={"output_final_state": None}),
]
_HEADS = [
    *_both("gva", shape={"B": 2, "H": 2, "HV": 4}, initial_state=True),
    *_both("gva_one_to_three", "full", "full", shape={"H": 1, "HV": 3}),
    *_both("odd_heads", "full", "full", shape={"B": 3, "H": 3, "HV": 3}),
    *_both("K60_V100", shape={"K": 60, "V": 100}, **HARD),
    *_both("K100_V60", "full", "full", shape={"K": 100, "V": 60}, **HARD),
    *_both("K16_V40", "full", "full", shape={"K": 16, "V": 40}, **HARD),
    *_both("K64_V64", "full", "full", shape={"K": 64, "V": 64}),
    *_both("K64_V128", "full", "full", shape={"K": 64, "V": 128}, **HARD),
    *_both("K128_V64", "full", "full", shape={"K": 128, "V": 64}, **HARD),
    *_both("K128_V128", "full", "full", shape={"K": 128, "V": 128}),
    *_both("K96_V192", "full", "full", shape={"K": 96, "V": 192}),
    *_both("K256_V256", "full", "full", shape={"K": 256, "V": 256}),
    *_both("K256_V512", "full", "full", shape={"K": 256, "V": 512}),
]
_PACKS = [
    *_both("pack", "kind", "kind", shape={"lengths": MIXED_LENGTHS}, initial_state=True, **HARD),
    *_both(
        "pack_of_tokens",
        gradients="full",
        shape={"lengths": (1,) * 7 + (40,)},
        index_dtype="int32",
        **HARD,
    ),
    *_both("pack_host_offsets", gradients="full", shape={"lengths": (17, 0, 30)}, host_offsets=True, **HARD),
    *_both("pack_no_state", "full", "full", shape={"lengths": MIXED_LENGTHS}, **HARD),
    *_both(
        "pack_padded",
        "kind",
        "kind",
        shape={"lengths": MIXED_LENGTHS, "padding": 21},
        initial_state=True,
        **HARD,
    ),
    *_both(
        "pack_padded_model",
        shape={"lengths": (5, 0, 34, 0, 0), "padding": 70, "HV": 4},
        options=_SIGMOID,
        **HARD,
    ),
    *_both(
        "pack_padded_softplus",
        gradients="full",
        shape={"lengths": (17,), "padding": 1},
        options=_SOFTPLUS,
        **HARD,
    ),
    *_both("pack_of_padding", shape={"lengths": (0, 0), "padding": 9}, initial_state=True, **HARD),
    *_both(
        "pack_padded_host_offsets",
        "full",
        "full",
        shape={"lengths": (17, 0, 30), "padding": 5},
        host_offsets=True,
        **HARD,
    ),
    _v("pack_padded_out", shape={"lengths": (3, 0, 14), "padding": 6}, out=True, **HARD),
    _v("out", "once", out=True),
    _v("out_padded", "full", out=True, layout="padded"),
    *_both(
        "pack_model",
        "full",
        "full",
        shape={"lengths": MIXED_LENGTHS, "H": 2, "HV": 4, "V": "2K"},
        options={**MODEL, "state_v_first": True},
        initial_state=True,
        **HARD,
    ),
]

_TWO_CHUNKS = {"T": 135}
_AMONG_OTHERS = {"lengths": (5, 70, 0, 19), "padding": 3, "H": 2, "HV": 2}
_SERVED = {"lengths": (70, 0, 17, 130, 33, 5, 0), "padding": 11}
"""What a server prefills: prompts of any length, empty ones, and padding."""


_PARTS: Mapping[str, frozenset[str]] = {
    "chunk": frozenset(
        {"indexed", "indexed_negative", "inplace", "inplace_negative", "fresh", "checkpoints"}
    ),
    "recurrent": frozenset(),
    "decode": frozenset(),
    "commit": frozenset(),
}
"""Ways of using pools that are parts of others: the full suite has them."""


def _pools(family: str, shape: Mapping[str, Any], *each_kind: str, **rest: Any) -> list[Variation]:
    """Every way of using pools that ops of a family have, those of ``each_kind`` with each array kind."""
    return [
        _v(
            name + suffix,
            where if not suffix else "full",
            "pool",
            pool=name,
            shape={**shape, **({"V": "2K"} if suffix else {})},
            options={
                "output_final_state": None if pool.read_only or family == "commit" else True,
                "state_v_first": True if suffix else None,
            },
            **rest,
        )
        for name, pool in POOLS.items()
        if pool.suits(family)
        for where in ("kind" if name in each_kind else "full" if name in _PARTS[family] else "once",)
        for suffix in ("", "_v_first")
    ]


CHUNK = [
    *_both("", "everywhere", "everywhere"),
    *_PACKS,
    *_GATES,
    *_NORMS,
    *_LAYOUTS,
    *_STATES,
    *_HEADS,
    *[v for T in (1, 64, 129) for v in _both(f"T{T}", gradients="full", shape={"T": T})],
    *[v for T in (15, 16, 17, 63, 65, 128, 200) for v in _both(f"T{T}", "full", "full", shape={"T": T})],
    *_both("keep_residuals", options={"disable_recompute": True}),
    *_both("checkpoints", gradients="full", shape={"T": 200}, options={"checkpoint_every": 64}),
    _v("checkpoints_pack", shape={"lengths": (0, 130, 64, 1, 65)}, options={"checkpoint_every": 64}, **HARD),
    _v(
        "checkpoints_v_first",
        "full",
        shape={"T": 300, "V": "2K", "B": 2},
        options={"checkpoint_every": 128, "state_v_first": True},
        initial_state=True,
    ),
    _v("checkpoints_bf16", "full", shape={"T": 200}, options={"checkpoint_every": 64}, initial_state=True,
       state_dtype="bfloat16"),
    *_pools("chunk", _SERVED, "checkpoints_moved", **HARD),
    _v("moved_batch", "once", "pool", pool="moved", shape={"B": 4, "T": 35}),
    _v("checkpoints_alone", "once", "pool", pool="checkpoints", shape={"T": 150}, options={"checkpoint_every": 64}),
    _v("checkpoints_model", "once", "pool", pool="checkpoints_moved", shape={**_SERVED, "HV": 4, "V": "2K"},
       options={**MODEL, "state_v_first": True}, state_dtype="bfloat16", index_dtype="int32", **HARD),
    _v("checkpoints_out", "once", "pool", pool="checkpoints_other_pool", shape=_SERVED, out=True, **HARD),
    _v("checkpoints_no_state_asked", "once", "pool", pool="checkpoints_moved", shape=_SERVED,
       options={"output_final_state": None}, **HARD),
    _v("", "kind", "recomputed_gradients", initial_state=True),
    _v("pack", "once", "recomputed_gradients", shape={"lengths": (0, 1, 17, 65)}, initial_state=True, **HARD),
    _v("pack_padded", "once", "recomputed_gradients", shape={"lengths": (0, 1, 17, 65), "padding": 40},
       initial_state=True, **HARD),
    _v("", "kind", "causality", shape=_TWO_CHUNKS),
    _v("mixed", "once", "causality", shape=_TWO_CHUNKS, gates="mixed", options=_LOG),
    _v("model", "once", "causality", shape=_TWO_CHUNKS, options=MODEL, initial_state=True),
    _v("pack", "full", "causality", shape={"lengths": (50, 0, 85)}),
    _v("", "once", "causality_append", shape=_TWO_CHUNKS),
    _v("model", "full", "causality_append", shape=_TWO_CHUNKS, options=MODEL),
    _v("mixed", "full", "causality_append", shape=_TWO_CHUNKS, gates="mixed", options=_LOG),
    _v("", "once", "gradient_causality", shape=_TWO_CHUNKS, initial_state=True),
    _v("softplus", "once", "gradient_causality", shape=_TWO_CHUNKS, options=_SOFTPLUS),
    _v("mixed", "full", "gradient_causality", shape=_TWO_CHUNKS, gates="mixed", options=_LOG),
    _v("model", "full", "gradient_causality", shape=_TWO_CHUNKS, options=MODEL, initial_state=True),
    _v("", "once", "gradient_causality_append", shape=_TWO_CHUNKS, initial_state=True),
    _v("softplus", "once", "gradient_causality_append", shape=_TWO_CHUNKS, options=_SOFTPLUS),
    _v("model", "full", "gradient_causality_append", shape=_TWO_CHUNKS, options=MODEL),
    _v("", "kind", "split", shape=_LONGER),
    _v("v_first", "once", "split", shape={**_LONGER, "V": "2K"}, options={"state_v_first": True}, initial_state=True),
    _v("model", "full", "split", shape=_TWO_CHUNKS, options=MODEL),
    _v("", "once", "split_decode", shape=_LONGER),
    _v("v_first", "full", "split_decode", shape={**_LONGER, "V": "2K"}, options={"state_v_first": True}),
    _v("model", "full", "split_decode", shape=_LONGER, options=MODEL),
    _v("", "kind", "determinism", shape={"B": 2, "T": 135, "HV": 4}),
    _v("", "once", "gradient_determinism", shape={"B": 2, "T": 135, "HV": 4}, options=_SOFTPLUS),
    _v("pack", "full", "gradient_determinism", shape={"lengths": MIXED_LENGTHS}, initial_state=True),
    _v("", "kind", "batch_invariance", shape={"lengths": (65, 0, 1, 17, 64)}, initial_state=True),
    _v("batch", "once", "batch_invariance", shape={"B": 3, "T": 70, "HV": 2}, initial_state=True),
    _v("", "once", "gradient_batch_invariance", shape={"lengths": (65, 0, 1, 17, 64)}, options=MODEL),
    _v("", "kind", "nan_containment", shape=_AMONG_OTHERS, options=_SIGMOID, initial_state=True),
    _v("batch", "once", "nan_containment", shape={"B": 3, "T": 37, "H": 2, "HV": 4}, options=_SOFTPLUS),
    _v("", "once", "gradient_nan_containment", shape=_AMONG_OTHERS, options=_SOFTPLUS, initial_state=True),
    _v("batch", "full", "gradient_nan_containment", shape={"B": 3, "T": 37, "H": 2, "HV": 4}, options=_SIGMOID),
    _v("", "once", "uninitialised", shape={"lengths": MIXED_LENGTHS}, options={"checkpoint_every": 64}, **HARD),
    _v("pack_padded", "once", "uninitialised", shape={"lengths": (0, 1, 17, 65), "padding": 40},
       options={"checkpoint_every": 64}, **HARD),
    _v("jit", "everywhere", mode="jit"),
    _v("jit_pack", "kind", mode="jit", shape={"lengths": MIXED_LENGTHS}, initial_state=True, **HARD),
    _v("jit_pack_padded", "kind", mode="jit", shape=_SERVED, initial_state=True, **HARD),
    _v("jit", "kind", "gradients", mode="jit", options=MODEL),
    _v("jit_pack_padded", "full", "gradients", mode="jit", shape=_SERVED, options=MODEL, **HARD),
    _v("jit_pool", "kind", "pool", mode="jit", pool="checkpoints_moved", shape=_SERVED, **HARD),
    _v("compile", "full", mode="compile"),
    _v("compile_pool", "full", "pool", mode="compile", pool="checkpoints_moved", shape=_SERVED, **HARD),
    _v("autocast_pool", "full", "pool", mode="autocast", pool="checkpoints_moved", shape=_SERVED, **HARD),
    _v("compile", "once", "gradients", mode="compile", options=MODEL, initial_state=True),
    *_both("autocast", "kind", "kind", mode="autocast"),
    _v("", "once", "graph"),
    _v("pack_padded", "once", "graph", shape=_SERVED, initial_state=True, **HARD),
    _v("pool", "once", "graph", pool="checkpoints_moved", shape=_SERVED, **HARD),
    *_both(
        "long", "full", "full",
        shape={"T": 2048, "H": 2, "HV": 2, "K": 128, "V": 128}, options={**_UNBOUNDED}, slow=True,
    ),
    *_both(
        "long_safe", "full", "full",
        shape={"T": 2048, "H": 2, "HV": 2, "K": 128, "V": 128}, options=MODEL, slow=True,
    ),
    *_both(
        "long_init", "full", "full",
        shape={"T": 2048, "H": 2, "HV": 2, "K": 128, "V": 128}, options={**_UNBOUNDED}, gates="init", slow=True,
        **HARD,
    ),
]  # fmt: skip

_DECODE = {"B": 4, "T": 1}
_SERVED_TOKENS = {"lengths": (3, 0, 1, 5, 2, 2), "padding": 4}
RECURRENT = [
    *_both("", "everywhere", "kind"),
    _v("decode", "dtype", shape=_DECODE, initial_state=True),
    _v("decode_model", "kind", shape={**_DECODE, "HV": 4, "V": "2K"}, options=MODEL, initial_state=True),
    *_PACKS,
    *_GATES,
    *_NORMS,
    *_LAYOUTS,
    *_STATES,
    *_HEADS,
    *[_v(f"T{T}", "full", shape={"T": T}) for T in (2, 3, 16, 17, 70)],
    *_pools("recurrent", {"B": 6, "T": 3}, "inplace_negative", "candidates_moved"),
    _v("moved_out", "once", "pool", pool="moved", shape=_SERVED_TOKENS, out=True),
    _v("moved_pack", "once", "pool", pool="moved", shape=_SERVED_TOKENS, index_dtype="int32"),
    _v("candidates_pack", "once", "pool", pool="candidates_moved", shape=_SERVED_TOKENS),
    _v("candidates_other_pack", "full", "pool", pool="candidates_other_pool", shape=_SERVED_TOKENS),
    _v("records_pack", "once", "pool", pool="records", shape=_SERVED_TOKENS, index_dtype="int32"),
    _v("records_model", "dtype", "pool", pool="records", shape={"B": 5, "T": 4, "HV": 4, "V": "2K"},
       options={**MODEL, "state_v_first": True, "output_final_state": True}),
    _v("records_bf16", "once", "pool", pool="records_moved", shape={"B": 5, "T": 3}, state_dtype="bfloat16"),
    _v("records_strided", "once", "pool", pool="records", shape={"B": 5, "T": 3, "HV": 4}, layout="padded"),
    _v("indexed_pack", "once", "pool", pool="indexed_null", shape=_SERVED_TOKENS),
    _v("inplace_decode", "dtype", "pool", pool="inplace_negative", shape={"B": 5, "T": 1},
       options={**MODEL, "output_final_state": True}, state_dtype="float32"),
    _v("inplace_no_state_asked", "once", "pool", pool="inplace", shape={"B": 5, "T": 1},
       options={"output_final_state": None}),
    _v("inplace_pack", "once", "pool", pool="inplace_strided", shape={"lengths": (3, 0, 1, 5)}),
    _v("accepted_pack", "once", "pool", pool="accepted_inplace", shape={"lengths": (3, 0, 1, 5)}),
    _v("inplace_bf16", "once", "pool", pool="inplace_negative", shape={"B": 5, "T": 2}, state_dtype="bfloat16"),
    _v("inplace_int32", "once", "pool", pool="inplace_negative", shape={"B": 5, "T": 2}, index_dtype="int32"),
    _v("", "once", "recomputed_gradients", initial_state=True),
    _v("", "once", "causality", shape={"T": 20}),
    _v("", "once", "causality_append", shape={"T": 20}),
    _v("", "once", "gradient_causality", shape={"T": 20}, initial_state=True),
    _v("", "once", "gradient_causality_append", shape={"T": 20}, initial_state=True),
    _v("", "once", "split", shape={"T": 5}, initial_state=True),
    _v("v_first", "full", "split", shape={"T": 5, "V": "2K"}, options={"state_v_first": True}),
    _v("", "dtype", "drift", shape={"B": 2, "T": 256}, gates="slow", options=MODEL, **HARD),
    _v("neg_eigval", "once", "drift", shape={"T": 400}, gates="zero", collinear=True,
       options={**MODEL, "allow_neg_eigval": True}, beta_dtype="bfloat16", **HARD),
    _v("log", "full", "drift", shape={"B": 2, "T": 1000}, gates="slow", options=_LOG, slow=True, **HARD),
    _v("", "once", "determinism", shape={"B": 3, "T": 7}),
    _v("decode", "kind", "determinism", shape=_DECODE, initial_state=True),
    _v("", "kind", "batch_invariance", shape={"lengths": (3, 0, 1, 5)}, initial_state=True),
    _v("batch", "once", "batch_invariance", shape={"B": 3, "T": 2}, initial_state=True),
    _v("", "kind", "nan_containment", shape={"lengths": (3, 5, 0, 2), "padding": 1, "H": 2, "HV": 4},
       options=_SOFTPLUS, initial_state=True),
    _v("batch", "once", "nan_containment", shape={"B": 3, "T": 1, "H": 2, "HV": 4}, options=_SIGMOID,
       initial_state=True),
    _v("", "once", "uninitialised", shape={"lengths": (3, 0, 1, 5)}, initial_state=True, **HARD),
    _v("jit", "everywhere", mode="jit", initial_state=True),
    _v("jit_pool", "kind", "pool", mode="jit", pool="inplace_negative", shape={"B": 5, "T": 2}),
    _v("jit_records", "kind", "pool", mode="jit", pool="records", shape=_SERVED_TOKENS),
    _v("jit_candidates", "kind", "pool", mode="jit", pool="candidates_moved", shape=_SERVED_TOKENS),
    _v("compile", "full", mode="compile"),
    _v("compile_pool", "full", "pool", mode="compile", pool="moved", shape={"B": 4, "T": 2}),
    _v("autocast", "kind", mode="autocast", initial_state=True),
    _v("autocast_pool", "kind", "pool", mode="autocast", pool="inplace_negative", shape={"B": 5, "T": 2}),
    _v("", "once", "graph", shape=_DECODE, initial_state=True),
    _v("decode_pool", "once", "graph", pool="inplace_null", shape={"B": 6, "T": 1}),
    _v("candidates", "once", "graph", pool="candidates_moved", shape=_SERVED_TOKENS),
    _v("records", "once", "graph", pool="records", shape=_SERVED_TOKENS),
]  # fmt: skip

_GATED: Any = {"norm": "vector", "z": True, "conv_bias": True}
_SERVED_KDA: Any = {**MODEL, "output_final_state": True}
DECODE = [
    _v("", "everywhere"),
    _v("decode", "dtype", shape=_DECODE, **_GATED),
    _v("decode_model", "kind", shape={**_DECODE, "HV": 4, "V": "2K"}, options=MODEL, **_GATED),
    *_short([*_PACKS, *_GATES, *_NORMS, *_LAYOUTS, *_STATES, *_HEADS]),
    *[_v(f"T{T}", "full", shape={"T": T}) for T in (1, 2, 3, 16)],
    *[_v(f"w{w}", shape={"T": 3}, conv_width=w, **_GATED) for w in (2, 3)],
    _v("convolved", "kind", conv_width=0, norm="vector", z=True),
    _v("convolved_alone", conv_width=0),
    _v("norm_alone", norm="heads"),
    _v("silu", options={"norm_activation": "silu", "norm_eps": 1e-3}, norm="heads", z=True),
    _v("sigmoid", options={"norm_activation": "sigmoid"}, norm="vector", z=True),
    _v("weights_as_x", "kind", weight_dtype="bfloat16", **_GATED),
    _v("conv_rows", conv_indices=True, shape={"B": 4, "T": 3}),
    *_pools("decode", {"B": 6, "T": 3}, "inplace_negative", "records"),
    *[_v(f"{name}_gated", "once", "pool", pool=name, shape={"B": 6, "T": 3, "HV": 4}, conv_indices=i % 2 > 0,
         options=_SERVED_KDA, **_GATED)
      for i, name in enumerate(("inplace_null", "fresh", "moved", "candidates_moved", "accepted_inplace", "records"))],
    *[_v(f"{name}_windows", "once", "pool", pool=name, shape={"B": 6, "T": 3}, conv_windows=True,
         options={"output_final_state": True})
      for name in ("candidates", "candidates_moved", "accepted_inplace", "records", "records_fresh")],
    _v("candidates_pack", "once", "pool", pool="candidates_moved", shape=_SERVED_TOKENS, **_GATED),
    _v("records_pack", "once", "pool", pool="records", shape=_SERVED_TOKENS, index_dtype="int32", **_GATED),
    _v("windows_pack", "once", "pool", pool="records", shape=_SERVED_TOKENS, conv_windows=True, **_GATED),
    _v("inplace_pack", "once", "pool", pool="inplace_null", shape=_SERVED_TOKENS, out=True, **_GATED),
    _v("inplace_bf16", "once", "pool", pool="inplace_negative", shape={"B": 5, "T": 1}, state_dtype="bfloat16",
       options={**_SERVED_KDA, "state_v_first": True}, **_GATED),
    _v("records_strided", "once", "pool", pool="records", shape={"B": 5, "T": 3}, layout="padded", **_GATED),
    _v("", "once", "causality", shape={"T": 16}, **_GATED),
    _v("", "once", "causality_append", shape={"T": 16}, **_GATED),
    _v("decode", "kind", "determinism", shape=_DECODE, **_GATED),
    _v("", "kind", "batch_invariance", shape={"lengths": (3, 0, 1, 5)}, **_GATED),
    _v("batch", "once", "batch_invariance", shape={"B": 3, "T": 2}, **_GATED),
    _v("", "once", "uninitialised", shape={"lengths": (3, 0, 1, 5)}, **_GATED, **HARD),
    _v("jit", "everywhere", mode="jit", **_GATED),
    _v("jit_pool", "kind", "pool", mode="jit", pool="inplace_negative", shape={"B": 5, "T": 2}, **_GATED),
    _v("jit_records", "kind", "pool", mode="jit", pool="records", shape=_SERVED_TOKENS, **_GATED),
    _v("compile", "full", mode="compile", **_GATED),
    _v("compile_pool", "full", "pool", mode="compile", pool="moved", shape={"B": 4, "T": 2}, **_GATED),
    _v("autocast", "kind", mode="autocast", **_GATED),
    _v("decode_pool", "once", "graph", pool="inplace_null", shape={"B": 6, "T": 1}, **_GATED),
    _v("records", "once", "graph", pool="records", shape=_SERVED_TOKENS, **_GATED),
]  # fmt: skip

COMMIT = [
    *_pools("commit", {"B": 6, "T": 3}, "records"),
    _v("model", "kind", "pool", pool="records", shape={"B": 5, "T": 4, "HV": 4, "V": "2K"},
       options={"state_v_first": True}, index_dtype="int32"),
    _v("one_decay", "kind", "pool", pool="records_moved", shape={"B": 7, "T": 3, "HV": 4}, one_decay=True),
    _v("bf16", "once", "pool", pool="records", shape={"B": 5, "T": 4}, state_dtype="bfloat16"),
    _v("K60_V100", "once", "pool", pool="records", shape={"B": 3, "T": 4, "K": 60, "V": 100}),
    _v("strided", "once", "pool", pool="records", shape={"B": 3, "T": 4, "HV": 4}, layout="padded"),
    _v("conv", "kind", "pool", pool="records", shape={"B": 6, "T": 4}, conv_state_given=True),
    _v("conv_rows", "once", "pool", pool="records_moved", shape={"B": 6, "T": 4}, conv_state_given=True,
       conv_indices=True),
    _v("windows", "once", "pool", pool="records", shape={"B": 6, "T": 4}, conv_state_given=True, conv_windows=True),
    _v("jit", "kind", "pool", mode="jit", pool="records", shape={"B": 5, "T": 3}),
    _v("compile", "full", "pool", mode="compile", pool="records", shape={"B": 5, "T": 3}),
    _v("graph", "once", "graph", pool="records", shape={"B": 6, "T": 3}),
]  # fmt: skip

_BOUNDED = {"lower_bound": -5.0}
GATE = [
    *_both("", "everywhere", "everywhere"),
    *_both("bounded", "kind", "kind", options=_BOUNDED),
    *_both("bounded_no_A_log", options=_BOUNDED, A_log=False),
    *_both("flat_bias", dt_bias="flat"),
    *_both("no_bias", dt_bias=""),
    *_both("one_per_head", shape={"K": 0}),
    *_both("bf16_bias", bias_dtype="bfloat16"),
    *[
        v
        for gates in ("init", "slow", "zero", "floor", "mixed")
        for v in _both(gates, gradients="full", gates=gates, **HARD)
    ],
    *[v for gates in ("zero", "floor") for v in _both(f"bounded_{gates}", gates=gates, options=_BOUNDED, **HARD)],
    *[v for gates in ("still", "steep", "cliff") for v in _both(gates, gates=gates, shape=_ENDS, **HARD)],
    *[
        v
        for gates in ("still", "steep", "cliff")
        for v in _both(f"bounded_{gates}", gates=gates, options=_BOUNDED, shape=_ENDS, **HARD)
    ],
    *[v for name in ("padded", "stepped", "transposed") for v in _both(name, layout=name)],
    _v("", "once", "determinism"),
    _v("", "once", "gradient_determinism", shape={"B": 2, "T": 135}),
    _v("", "once", "uninitialised"),
    _v("jit", "everywhere", mode="jit"),
    _v("compile", "full", mode="compile"),
    *_both("autocast", "kind", "kind", mode="autocast"),
]  # fmt: skip

STAGE = [
    _v("", "everywhere"),
    _v("pack", "kind", shape={"lengths": MIXED_LENGTHS}, **HARD),
    _v("pack_padded", "once", shape={"lengths": (0, 1, 17, 65, 0), "padding": 70}, **HARD),
    _v("gva", shape={"B": 2, "HV": 4, "V": "2K"}),
    *[_v(f"C{C}", options={"chunk_size": C}) for C in (16, 32)],
    _v("wide_intermediates", "dtype", stage_dtype="float32"),
    _v("mixed_gates", gates="mixed", **HARD),
    _v("floor_gates", gates="floor", **HARD),
    _v("steep_gates", gates="steep", **HARD),
    _v("steep_gates_pack", "full", gates="steep", shape={"lengths": (0, 1, 17, 65)}, **HARD),
    _v("collinear", gates="slow", collinear=True, **HARD),
    _v("T1", shape={"T": 1}),
    _v("T64", shape={"T": 64}),
    _v("K60_V100", shape={"K": 60, "V": 100}, **HARD),
    *[_v(name, layout=name) for name in ("padded", "stepped", "transposed")],
    _v("", "once", "determinism"),
    _v("", "once", "uninitialised", shape={"lengths": (0, 1, 17, 65)}, **HARD),
    _v("jit", "everywhere", mode="jit"),
    _v("autocast", "kind", mode="autocast"),
]
STAGE_GATE = [
    _v("softplus", A_log=True, dt_bias="matrix"),
    _v("sigmoid", A_log=True, dt_bias="matrix", options=_BOUNDED),
    _v("sigmoid_no_A_log", options=_BOUNDED),
    *[
        _v(f"{gates}_{name}", A_log=True, dt_bias="matrix", gates=gates, shape=_ENDS, options=bound, **HARD)
        for gates in ("still", "steep")
        for name, bound in (("softplus", {}), ("sigmoid", _BOUNDED))
    ],
]
STAGE_STATE = [
    _v("initial_state", initial_state=True),
    _v("v_first", initial_state=True, shape={"V": "2K"}, options={"state_v_first": True}),
    _v("bf16_state", initial_state=True, state_dtype="bfloat16"),
]


def variations_of(op: str, family: str) -> list[Variation]:
    """Every variation of an op."""
    if family == "stage":
        extra = {"kda_chunk_gate": STAGE_GATE, "delta_rule_chunk_state": STAGE_STATE}
        return [*STAGE, *extra.get(op, [])]
    found = {"chunk": CHUNK, "recurrent": RECURRENT, "decode": DECODE, "commit": COMMIT, "gate": GATE}[family]
    return [*found, *_flags_not_named(op, found)]


def _flags_not_named(op: str, found: list[Variation]) -> list[Variation]:
    """Variations of the flags that nothing above sets: one that is added to an op's definition is varied at once."""
    named = {name for v in found for name in v.options}
    named |= {name for pool in POOLS.values() for name in pool.options}
    flags = [o.name for o in OPS[op].option_arguments if o.kind == "flag" and o.name not in named]
    return [v for name in flags for v in _both(name, options={name: True})]
