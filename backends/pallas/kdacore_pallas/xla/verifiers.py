"""Verifiers of the ``xla`` backend: each reads a request and returns the reason to decline it, or
None."""

from __future__ import annotations

from kdacore.types import Reason, Request


def no_float64(request: Request) -> Reason | None:
    """float64 needs JAX's x64 mode and gains nothing here: the reference backend serves it."""
    used = {request.dtype, request.state_dtype}
    used |= {spec.dtype for _, spec in request.tensors if spec.dtype.startswith("float")}
    if "float64" in used:
        return Reason("dtype", "float64 is not served", "float64", "float32, bfloat16 or float16")
    return None


def host_arrays_on_cpu(request: Request) -> Reason | None:
    """NumPy and torch callers are served by JAX's CPU device, so their arrays must be there."""
    if request.kind != "jax" and request.device.type != "cpu":
        return Reason(
            "device", f"{request.kind} arrays are served on the CPU only", str(request.device), "cpu"
        )
    return None


def not_captured(request: Request) -> Reason | None:
    """JAX cannot run inside another framework's trace."""
    if request.kind == "torch" and request.traced:
        return Reason("traced", "torch.compile cannot trace into JAX", "fake tensors", "eager torch tensors")
    return None
