"""One conformance case as data: which check, on which call, made of which numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from kdacore.ops import OPS
from kdacore.selfcheck.inputs import Shape
from kdacore.types import ArrayKind

Layout = Literal["contiguous", "padded", "stepped", "transposed"]
"""How arrays lie in memory, always with poison around them (NumPy and torch): ``contiguous``; ``padded``: a slice
of a larger array in every axis; ``stepped``: every second element of the last axis; ``transposed``: axes 1 and 2
swapped in memory."""

Mode = Literal["eager", "jit", "compile", "autocast"]
"""``eager``; ``jit``: under ``jax.jit``; ``compile``: under ``torch.compile(fullgraph=True)``; ``autocast``: forward
and backward under ``torch.autocast`` to bfloat16, which may change nothing."""

DIFFERENTIATES = frozenset(
    {
        "gradients",
        "recomputed_gradients",
        "gradient_causality",
        "gradient_causality_append",
        "gradient_determinism",
    }
)
"""Checks whose call must be differentiable."""

Options = tuple[tuple[str, Any], ...]

MODEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
"""The options of a model with a bounded gate, everything computed in the kernel."""
UNBOUNDED_MODEL = {k: v for k, v in MODEL.items() if k not in ("safe_gate", "lower_bound")}


def options(**values: Any) -> Options:
    """Keyword options of the public call as a hashable, ordered tuple."""
    return tuple(sorted(values.items()))


_DEFAULT_SHAPE = Shape()


@dataclass(frozen=True)
class Case:
    """A check and the call it is about. Two equal cases always see the same numbers."""

    check: str
    backend: str
    op: str
    kind: ArrayKind = "numpy"
    device: str = "cpu"
    shape: Shape = _DEFAULT_SHAPE
    dtype: str = "float32"
    """of q, k, v; of g for the gate ops."""
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"
    bias_dtype: str = "float32"
    state_dtype: str = "float32"
    index_dtype: str = "int64"
    stage_dtype: str = ""
    """of the intermediates a stage reads; that of q, k, v when empty."""
    gates: str = "random"
    """A distribution of :data:`kdacore.selfcheck.inputs.GATES`."""
    collinear: bool = False
    tiny_rows: bool = False
    """Rows of q and k that are zero, as padding has them, or so small that the l2norm's epsilon decides."""
    A_log: bool = True
    """Give ``A_log`` when the gate is computed in the kernel (the bounded gate may do without)."""
    dt_bias: Literal["", "matrix", "flat"] = "matrix"
    initial_state: bool = False
    q_given: bool = True
    """Give ``q`` to the stage ``kda_recompute_w_u``, which does without it too."""
    host_offsets: bool = False
    """Give ``cu_seqlens_cpu`` too."""
    pool: str = ""
    """How the state pool is used; a key of :data:`kdacore.testing.pools.POOLS`."""
    out: bool = False
    options: Options = ()
    layout: Layout = "contiguous"
    mode: Mode = "eager"
    factor: float = 1.0
    """Bounds are multiplied by this: 2 in the contract's hard cases."""
    seed: int = 0
    slow: bool = False
    note: str = ""
    """What is special about this case, for its name."""

    @property
    def id(self) -> str:
        """A readable name, unique within a suite."""
        parts = [self.op, self.check, self.note or "base", self.kind, self.dtype]
        return "-".join(p for p in parts if p)

    @property
    def family(self) -> str:
        return OPS[self.op].family

    @property
    def scalar_gate(self) -> bool:
        return OPS[self.op].scalar_gate or self.shape.K == 0

    def option(self, name: str, default: Any = None) -> Any:
        """The value of one option of the public call."""
        return dict(self.options).get(name, default)

    def having(self, **changes: Any) -> Case:
        """The same with some options of the public call changed; None takes an option away."""
        merged = {**dict(self.options), **changes}
        return replace(self, options=options(**{k: v for k, v in merged.items() if v is not None}))

    @property
    def raw_gate(self) -> bool:
        """Is g a raw gate input?"""
        if self.family == "gate" or self.op == "kda_chunk_gate":
            return self.A_log or self.option("lower_bound") is not None
        return bool(self.option("use_gate_in_kernel", False))

    @property
    def raw_beta(self) -> bool:
        return bool(self.option("use_beta_sigmoid_in_kernel", False))

    @property
    def state_tail(self) -> tuple[int, int]:
        K, V = self.shape.K, self.shape.V
        return (V, K) if self.option("state_v_first", False) else (K, V)
