"""The reference backend: a float64 recurrence (the oracle) and a chunked forward and backward on the
array API. This file declares it; the other modules are imported by the first call that needs them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kdacore.hookspecs import hookimpl
from kdacore.lazy import lazy_function
from kdacore.ops import (
    CHECKPOINT_FEATURES,
    GATE_FEATURES,
    POOL_FEATURES,
    RECURRENT_FEATURES,
    SEQUENCE_FEATURES,
    STAGE_FEATURES,
)
from kdacore.types import Backend, OpImpl, Reason, Request, reads_no_lengths


@reads_no_lengths
def not_traced(request: Request) -> Reason | None:
    """Lengths, indices and gates are read as values, which a JAX tracer does not have."""
    if request.kind == "jax" and request.traced:
        return Reason(
            "traced",
            "needs concrete values: the reference backend cannot run inside jit/grad/vmap tracing",
            got="a traced call",
            want="concrete jax arrays",
        )
    return None


_READ_ON_HOST = (
    "cu_seqlens",
    "state_indices",
    "num_accepted_tokens",
    "has_initial_state",
    "write_indices",
    "checkpoint_offsets",
    "checkpoint_indices",
    "record_indices",
    "num_replayed",
    "conv_indices",
)


@reads_no_lengths
def has_values(request: Request) -> Reason | None:
    """Offsets and indices are read as values, which torch's meta tensors lack. All other arrays may
    be meta tensors."""
    if request.device.type != "meta":
        return None
    read = [n for n in _READ_ON_HOST if request.has(n) and not request.has(f"{n}_cpu")]
    if not read:
        return None
    return Reason(
        "meta",
        "reads offsets and indices, which have no values on the meta device",
        got=f"{', '.join(read)} on meta",
        want="cu_seqlens_cpu" if read == ["cu_seqlens"] else "arrays with values",
    )


_lazy = partial(lazy_function, "kdacore_reference")


def _op(
    forward: Callable[..., Any],
    serves: frozenset[str],
    backward: Callable[..., Any] | None = None,
) -> OpImpl:
    return OpImpl(
        forward=forward,
        backward=backward,
        serves=serves,
        verifiers=(not_traced, has_values),
        verified_archs=frozenset({"*"}),
        batch_invariant=True,
    )


_CONVOLUTION = frozenset({"conv", "conv_indices", "conv_windows"})
_AROUND_THE_RECURRENCE = _CONVOLUTION | {"conv_bias", "output_gate", "output_norm"}
_COMMITTING = _CONVOLUTION | {"grouped_value_heads", "null_index", "state_v_first", "write_indices"}


def make_backend() -> Backend:
    """The backend named ``reference``: every op, every array kind, any device."""
    chunk_backward = _lazy("chunk_backward", "chunk_backward")
    chunk = _op(
        _lazy("chunk_forward", "chunk_forward"),
        SEQUENCE_FEATURES | POOL_FEATURES | CHECKPOINT_FEATURES | {"out"},
        chunk_backward,
    )
    decoding = SEQUENCE_FEATURES | POOL_FEATURES | RECURRENT_FEATURES | {"out", "records"}
    recurrent = _op(_lazy("recurrent", "recurrent_forward"), decoding, chunk_backward)
    around = (decoding - {"initial_state"}) | _AROUND_THE_RECURRENCE
    decode = _op(_lazy("decode", "decode_forward"), around)
    gate_backward = _lazy("gate", "kda_gate_backward")
    ops = {
        "chunk_kda": chunk,
        "chunk_gated_delta_rule": chunk,
        "fused_recurrent_kda": recurrent,
        "fused_recurrent_gated_delta_rule": recurrent,
        "fused_decode_kda": decode,
        "fused_decode_gated_delta_rule": decode,
        "commit_records": _op(_lazy("records", "commit_records"), _COMMITTING),
        "kda_gate": _op(_lazy("gate", "kda_gate_forward"), GATE_FEATURES, gate_backward),
        **{stage: _op(_lazy("stages", stage), serves) for stage, serves in STAGE_FEATURES.items()},
    }
    return Backend(
        name="reference",
        version="0.1.0",
        kinds=("numpy", "torch", "jax"),
        ops=ops,
        summary="array API code for any machine; float32 arithmetic, float64 for float64 inputs",
        rank=0,
    )


@hookimpl
def kdacore_backends() -> list[Backend]:
    """The hook kdacore finds this backend by."""
    return [make_backend()]
