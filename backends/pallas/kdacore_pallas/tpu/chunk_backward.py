"""``chunk_kda`` and ``chunk_gated_delta_rule`` backward by the kernels."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.types import ChunkInputs, GateInputs, InputGrads, OutputGrads, Request
from kdacore_pallas.tpu import chunk_backward_kernel, chunk_forward_kernel, plan
from kdacore_pallas.tpu.chunk_forward import chunk_schedule, with_empty_sequences
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.options import kernel_options
from kdacore_pallas.xla import gate
from kdacore_pallas.xla.numerics import F32, summed_like
from kdacore_pallas.xla.plan import ChunkTable

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
    schedule, table = chunk_schedule(request, x, inputs.cu_seqlens)
    options = kernel_options(request)
    if saved:
        (starts,) = saved
    else:
        starts = chunk_forward_kernel.chunk_forward(
            request, inputs, x, options, schedule, table, launch, ("starts",)
        )["starts"]
    d = chunk_backward_kernel.chunk_backward(
        request, inputs, grads, starts, x, options, schedule, table, launch
    )
    dq, dk, dv = (
        summed_like(plan.scatter(table, d[n]).reshape(a.shape), a)
        for n, a in zip(("dq", "dk", "dv"), inputs, strict=False)
    )
    dbeta = _tokens(request, table, d["dbeta"])
    dbeta = gate.beta_backward(request, _of_sequences(table, inputs.beta).astype(F32), dbeta)
    dg, dA, dbias = _gate_grads(request, inputs, table, d)
    dinitial = d.get("dinitial")
    if dinitial is not None:
        if table is not None:
            dinitial = with_empty_sequences(dinitial[:-1], grads.final_state, inputs.cu_seqlens)
        dinitial = summed_like(dinitial, inputs.initial_state)
    return InputGrads(dq, dk, dv, dg, summed_like(dbeta, inputs.beta), dA, dbias, dinitial)


def start_gradients(
    request: Request, inputs: ChunkInputs, grads: OutputGrads, hb: int, launch: Launch
) -> Array:
    """``[N, HV, K, V]`` gradients of ``inputs.initial_state`` alone, by one kernel."""
    x = plan.make_chunk_grid(request, hb, launch.together)
    schedule, table = chunk_schedule(request, x, inputs.cu_seqlens)
    found = chunk_backward_kernel.start_gradients(
        request, inputs, grads, x, kernel_options(request), schedule, table, launch
    )
    return found if table is None else with_empty_sequences(found[:-1], grads.final_state, inputs.cu_seqlens)


def _tokens(request: Request, table: ChunkTable | None, per_head: Array) -> Array:
    """``[B, HV, NC * C]`` back to ``[B, T, HV]``."""
    rows = jnp.moveaxis(per_head, 2, 1)
    return rows[:, : request.T] if table is None else plan.scatter(table, rows)


def _of_sequences(table: ChunkTable | None, x: Array) -> Array:
    """``[B, T, ...]`` with zeros in tokens of no sequence, which may hold NaN."""
    if table is None:
        return x
    belongs = table.slot_of_token < table.rows.size
    return jnp.where(belongs.reshape(1, -1, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def _gate_grads(
    request: Request, inputs: ChunkInputs, table: ChunkTable | None, d: dict[str, Array]
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of g, A_log and dt_bias."""
    if request.scalar_gate:
        raw = GateInputs(_of_sequences(table, inputs.g), inputs.A_log, inputs.dt_bias)
        found = gate.kda_gate_backward(request, raw, _tokens(request, table, d["dg"]))
        return found.g, found.A_log, found.dt_bias
    dA = dbias = None
    if inputs.A_log is not None:
        dA = summed_like(jnp.sum(d["dA"], (0, 2)), inputs.A_log)
    if inputs.dt_bias is not None:
        dbias = summed_like(jnp.sum(d["dbias"], 0).reshape(inputs.dt_bias.shape), inputs.dt_bias)
    dg = plan.scatter(table, d["dg"]).reshape(inputs.g.shape)
    return summed_like(dg, inputs.g), dA, dbias
