"""What this backend declines. A verifier reads a request, never values, and names its reason by a stable code."""

from __future__ import annotations

from kdacore.types import Reason, Request

DTYPES = ("float32", "float64")


def full_precision(request: Request) -> Reason | None:
    """NumPy has no bfloat16, and this example does not widen."""
    if request.dtype not in DTYPES:
        return Reason("dtype", "computes in full precision only", request.dtype, " or ".join(DTYPES))
    return None


def not_packed(request: Request) -> Reason | None:
    """Sequences of one length only."""
    if request.packed:
        return Reason("packed", "takes no packed sequences", "cu_seqlens", "a batch without it")
    return None


def log_decay_given(request: Request) -> Reason | None:
    """The gate has been computed before the call."""
    if request.gate != "log":
        return Reason("gate", "computes no gates", f"gate {request.gate!r}", "the log decay as g")
    return None


def nothing_fused(request: Request) -> Reason | None:
    """The same for the norm of q and k and the sigmoid of beta."""
    asked = [name for name in ("qk_l2norm", "beta_sigmoid") if getattr(request, name)]
    if asked:
        return Reason("fused_input", "takes q, k and beta as they are", ", ".join(asked), "neither")
    return None


def no_checkpoints(request: Request) -> Reason | None:
    """No states from inside a sequence."""
    if request.checkpoint_every:
        return Reason("checkpoints", "returns no checkpoints", f"every {request.checkpoint_every}", "none")
    return None


def no_pool(request: Request) -> Reason | None:
    """States are read and returned, never written in place."""
    if request.pool_size or request.inplace_state:
        return Reason(
            "state_pool", "writes no states in place and indexes no pool", "a pool", "initial_state [N, ...]"
        )
    return None


COMMON = (full_precision, not_packed, log_decay_given, nothing_fused)
