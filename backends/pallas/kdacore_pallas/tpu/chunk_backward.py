"""``chunk_kda`` and ``chunk_gated_delta_rule`` backward by the kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.types import ChunkInputs, GateInputs, InputGrads, OutputGrads, Request
from kdacore_pallas.gate_rates import SHRINK, held_as
from kdacore_pallas.tpu import chunk_backward_kernel, chunk_forward_kernel, plan
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.options import kernel_options
from kdacore_pallas.tpu.schedule import chunk_schedule
from kdacore_pallas.xla import gate
from kdacore_pallas.xla.numerics import F32, summed_like

Array = Any


def backward(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Array, ...],
    grads: OutputGrads,
    hb: int,
    launch: Launch,
) -> InputGrads:
    """Gradients of the op, by a kernel that takes the chunks from last to first.

    ``saved`` is what the forward kept of the same call: the state that each chunk starts from. If it is empty, the
    forward kernel computes these states again and writes nothing else.
    """
    x = plan.make_chunk_grid(request, hb, launch.together)
    schedule, options = chunk_schedule(x, inputs.cu_seqlens), kernel_options(request)
    if saved:
        (starts,) = saved
    else:
        starts = chunk_forward_kernel.chunk_forward(
            request, inputs, x, options, schedule, launch, ("starts",)
        )["starts"]
    d = chunk_backward_kernel.chunk_backward(request, inputs, grads, starts, x, options, schedule, launch)
    dq, dk, dv = (
        summed_like(d[n].reshape(a.shape), a) for n, a in zip(("dq", "dk", "dv"), inputs, strict=False)
    )
    dbeta = _tokens(request, d["dbeta"])
    dbeta = gate.beta_backward(request, _of_sequences(inputs, inputs.beta).astype(F32), dbeta)
    dg, dA, dbias = _gate_grads(request, inputs, d)
    dinitial = d.get("dinitial")
    if dinitial is not None:
        dinitial = summed_like(dinitial, inputs.initial_state)
    return InputGrads(dq, dk, dv, dg, summed_like(dbeta, inputs.beta), dA, dbias, dinitial)


def start_gradients(
    request: Request, inputs: ChunkInputs, grads: OutputGrads, hb: int, launch: Launch
) -> Array:
    """``[N, HV, K, V]`` gradients of ``inputs.initial_state`` alone, by one kernel."""
    x = plan.make_chunk_grid(request, hb, launch.together)
    schedule = chunk_schedule(x, inputs.cu_seqlens)
    return chunk_backward_kernel.start_gradients(
        request, inputs, grads, x, kernel_options(request), schedule, launch
    )


def _tokens(request: Request, per_head: Array) -> Array:
    """``[B, HV, blocks * C]`` back to ``[B, T, HV]``."""
    return jnp.moveaxis(per_head, 2, 1)[:, : request.T]


def _of_sequences(inputs: ChunkInputs, x: Array) -> Array:
    """``[B, T, ...]`` with zeros in tokens of no sequence, which may hold NaN."""
    if inputs.cu_seqlens is None:
        return x
    belongs = jnp.arange(x.shape[1], dtype=jnp.int32) < inputs.cu_seqlens[-1].astype(jnp.int32)
    return jnp.where(belongs.reshape(1, -1, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def _gate_grads(
    request: Request, inputs: ChunkInputs, d: dict[str, Array]
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of g, A_log and dt_bias."""
    if request.scalar_gate:
        raw = GateInputs(_of_sequences(inputs, inputs.g), inputs.A_log, inputs.dt_bias)
        found = gate.kda_gate_backward(request, raw, _tokens(request, d["dg"]))
        return found.g, found.A_log, found.dt_bias
    dA = dbias = None
    if inputs.A_log is not None:
        dA = summed_like(jnp.sum(d["dA"], (0, 2)), inputs.A_log)
    if inputs.dt_bias is not None:
        dbias = jnp.sum(d["dbias"], 0).reshape(inputs.dt_bias.shape)
        if request.gate == "sigmoid":
            dbias = dbias * (1.0 / SHRINK)
        dbias = summed_like(held_as(dbias, inputs.dt_bias.dtype), inputs.dt_bias)
    return summed_like(d["dg"].reshape(inputs.g.shape), inputs.g), dA, dbias
