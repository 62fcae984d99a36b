"""Options of a kernel: those of the call, and the precision of its matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from kdacore.types import Gate, Request
from kdacore_pallas.tpu.products import Passes
from kdacore_pallas.tpu.sizes import CHUNK


@dataclass(frozen=True)
class KernelOptions:
    """The options of a call that a kernel reads, and the precision of its products."""

    gate: Gate
    lower_bound: float | None
    scale: float
    qk_l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    pairs: Passes
    """Interaction matrices."""
    values: Passes
    """Effective keys and values, outputs."""
    state: Passes
    """Products that read or write the state."""
    solve: Passes
    """Merging of inverse blocks."""
    inverse: str = "substitution"
    chunk: int = 128
    """Rows of a chunk: 64 or 128 (a grid step is always 128)."""


def kernel_options(request: Request, inverse: str = "substitution", chunk: int = CHUNK) -> KernelOptions:
    """The options of a request.

    float32 inputs use six passes everywhere. bfloat16 inputs use three: with one pass the state is
    too inaccurate on near-collinear keys, by measurement against the oracle.
    """
    passes = Passes.EXACT if request.dtype == "float32" else Passes.SPLIT
    return KernelOptions(
        request.gate,
        request.lower_bound,
        request.scale,
        request.qk_l2norm,
        request.beta_sigmoid,
        request.neg_eigval,
        pairs=passes,
        values=passes,
        state=passes,
        solve=passes,
        inverse=inverse,
        chunk=chunk,
    )
