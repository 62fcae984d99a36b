"""The reference backend as data. The modules that do the work are imported by the first call that needs them."""

from __future__ import annotations

from typing import Any

from kdacore.hookspecs import hookimpl
from kdacore.types import Backend, OpImpl, Outputs, Reason, Request


def not_traced(request: Request) -> Reason | None:
    """Lengths, indices and gates are read as values, so a JAX tracer cannot be served."""
    if request.kind == "jax" and request.traced:
        return Reason(
            "traced",
            "needs concrete values: the reference backend cannot run inside jit/grad/vmap tracing",
            got="a traced call",
            want="concrete jax arrays",
        )
    return None


def _recurrent_forward(request: Request, inputs: Any) -> Outputs:
    from kdacore_reference.recurrent import recurrent_forward

    return recurrent_forward(request, inputs)


def _chunk_forward(request: Request, inputs: Any) -> Outputs:
    from kdacore_reference.chunk_forward import chunk_forward

    return chunk_forward(request, inputs)


def make_backend() -> Backend:
    """The backend named ``reference``: every op, every array kind, any device."""
    common = {"verifiers": (not_traced,), "verified_archs": frozenset({"*"})}
    recurrent = OpImpl(forward=_recurrent_forward, **common)
    chunk = OpImpl(forward=_chunk_forward, **common)
    return Backend(
        name="reference",
        version="0.1.0",
        kinds=("numpy", "torch", "jax"),
        ops={
            "chunk_kda": chunk,
            "chunk_gated_delta_rule": chunk,
            "fused_recurrent_kda": recurrent,
            "fused_recurrent_gated_delta_rule": recurrent,
        },
        summary="array API code for any machine; float32 arithmetic, float64 for float64 inputs",
        rank=0,
    )


@hookimpl
def kdacore_backends() -> list[Backend]:
    """The hook kdacore finds this backend by."""
    return [make_backend()]
