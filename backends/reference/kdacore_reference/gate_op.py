"""``kda_gate``: the gate alone, forward and backward."""

from __future__ import annotations

from array_api_compat import array_namespace

from kdacore.types import Array, GateGrads, GateInputs, Request
from kdacore_reference.arrays import cast, compute_dtype, fold_sum, plain
from kdacore_reference.gates import gate_backward, gate_forward, gate_parameters


def kda_gate_forward(request: Request, inputs: GateInputs) -> Array:
    """Natural-log decay, shaped like ``g``, float32 (float64 for float64 inputs)."""
    xp = array_namespace(inputs.g)
    dtype = compute_dtype(xp, request)
    parameters = gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype)
    log_decay = gate_forward(request, cast(inputs.g, dtype), *parameters)
    return xp.asarray(log_decay, copy=True) if log_decay is inputs.g else log_decay


def kda_gate_backward(request: Request, inputs: GateInputs, dlog: Array) -> GateGrads:
    """Gradients of ``g``, ``A_log`` and ``dt_bias``, each shaped and typed like its input."""
    xp = array_namespace(inputs.g)
    dtype = compute_dtype(xp, request)
    parameters = gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype)
    g = cast(inputs.g, dtype)
    log_decay = gate_forward(request, g, *parameters)
    dg, dA = gate_backward(request, g, *parameters, log_decay, cast(dlog, dtype))
    A_log, bias = inputs.A_log, inputs.dt_bias
    if dA is not None and not request.scalar_gate:
        dA = xp.sum(dA, axis=-1)
    return GateGrads(
        g=cast(dg, plain(inputs.g).dtype),
        A_log=None if A_log is None else _total(dA, A_log),
        dt_bias=None if bias is None else _total(dg, bias),
    )


def _total(per_token: Array, like: Array) -> Array:
    """The sum over batch and tokens, in an order that later tokens without a gradient do not change."""
    xp = array_namespace(per_token)
    summed = fold_sum(fold_sum(xp.permute_dims(per_token, (1, 0, *range(2, per_token.ndim)))))
    return cast(xp.reshape(summed, like.shape), like.dtype)
