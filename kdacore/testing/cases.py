"""One conformance case as data: which check, on which call, made of which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdacore.calls.description import CallDescription

Layout = Literal["contiguous", "padded", "stepped", "transposed"]
"""How arrays lie in memory, always with poison around them (NumPy and torch): ``contiguous``; ``padded``: a slice
of a larger array in every axis; ``stepped``: every second element of the last axis; ``transposed``: axes 1 and 2
swapped in memory."""

Mode = Literal["eager", "jit", "compile", "autocast", "inference"]
"""``eager``; ``jit``: under ``jax.jit``; ``compile``: under ``torch.compile(fullgraph=True)``; ``autocast``: forward
and backward under ``torch.autocast`` to bfloat16, which may change nothing; ``inference``: under
``torch.inference_mode()``, on arrays made there (even seeds) or outside (odd ones)."""

DIFFERENTIATES = frozenset(
    {
        "gradients",
        "recomputed_gradients",
        "gradient_causality",
        "gradient_causality_append",
        "gradient_batch_invariance",
        "gradient_determinism",
        "gradient_nan_containment",
    }
)
"""Checks whose call must be differentiable."""
BATCH_INVARIANCE_CHECKS = frozenset({"batch_invariance", "gradient_batch_invariance"})
"""Checks of what ``OpImpl.batch_invariant`` declares."""

MODEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
"""The options of a model with a bounded gate, everything computed in the kernel."""
UNBOUNDED_MODEL = {k: v for k, v in MODEL.items() if k not in ("safe_gate", "lower_bound")}


@dataclass(frozen=True, kw_only=True)
class Case(CallDescription):
    """A check and the call it is about. Two equal cases always see the same numbers."""

    check: str
    backend: str
    layout: Layout = "contiguous"
    mode: Mode = "eager"
    negated: tuple[str, ...] = ()
    """torch: arguments that are lazily negated views, as ``z.conj().imag`` is."""
    fault: str = ""
    """What makes it a call that must be refused; see :func:`kdacore.testing.faults.faults_of`."""
    factor: float = 1.0
    """Bounds are multiplied by this: 2 in the contract's hard cases."""
    slow: bool = False
    note: str = ""
    """What is special about this case, for its name."""

    @property
    def id(self) -> str:
        """A readable name, unique within a suite."""
        parts = [self.op, self.check, self.note or "base", self.kind, self.dtype]
        return "-".join(p for p in parts if p)
