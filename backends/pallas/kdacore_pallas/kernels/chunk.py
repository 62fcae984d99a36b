"""``chunk_kda`` and ``chunk_gated_delta_rule`` on the kernels: plan, launch, and what is left around them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.types import ChunkInputs, GateInputs, InputGrads, OutputGrads, Outputs, Request
from kdacore_pallas.kernels import backward as kernel_backward
from kdacore_pallas.kernels import forward as kernel_forward
from kdacore_pallas.kernels import layout
from kdacore_pallas.kernels.forward import Launch
from kdacore_pallas.kernels.head import Math
from kdacore_pallas.kernels.layout import Blocks, Schedule
from kdacore_pallas.kernels.products import Passes
from kdacore_pallas.kernels.tiling import CHUNK
from kdacore_pallas.xla import gate
from kdacore_pallas.xla.layout import ChunkTable
from kdacore_pallas.xla.numerics import F32, summed_like

Array = Any


def make_math(request: Request, inverse: str = "substitution", chunk: int = CHUNK) -> Math:
    """float32 inputs: six passes everywhere. bfloat16 inputs: three, because one pass loses the state's accuracy
    on near-collinear keys (measured against the oracle; docs/lab/pallas.md)."""
    passes = Passes.EXACT if request.dtype == "float32" else Passes.SPLIT
    return Math(
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


def _schedule(request: Request, x: Blocks, cu_seqlens: Array | None) -> tuple[Schedule, ChunkTable | None]:
    if cu_seqlens is None:
        return layout.dense_schedule(x), None
    table = layout.packed_table(request, x, cu_seqlens)
    return layout.packed_schedule(table), table


def _or_empty(rows: Array, empty: Array | None, cu_seqlens: Array) -> Array:
    """State rows of a pack, with those of empty sequences (no chunk, never written) from ``empty`` or zero."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    other = jnp.zeros_like(rows) if empty is None else empty.astype(rows.dtype)
    return jnp.where((lengths == 0)[:, None, None, None], other, rows)


def forward(request: Request, inputs: ChunkInputs, hb: int, launch: Launch) -> Outputs:
    """Outputs by one kernel; ``hb`` q/k heads share a grid step."""
    x = layout.make_blocks(request, hb)
    schedule, table = _schedule(request, x, inputs.cu_seqlens)
    want = ("o", "final") if request.output_final_state else ("o",)
    math = make_math(request)
    outs = kernel_forward.chunk_forward(request, inputs, x, math, schedule, table, launch, want)
    final = outs.get("final")
    if final is not None and table is not None:
        final = _or_empty(final[:-1], inputs.initial_state, inputs.cu_seqlens)
    return Outputs(layout.scatter(table, outs["o"]), final)


def backward(
    request: Request,
    inputs: ChunkInputs,
    saved: tuple[Array, ...],
    grads: OutputGrads,
    hb: int,
    launch: Launch,
) -> InputGrads:
    """Gradients by two kernels: the states at each chunk's start, then the walk back."""
    x = layout.make_blocks(request, hb)
    schedule, table = _schedule(request, x, inputs.cu_seqlens)
    math = make_math(request)
    states = kernel_forward.chunk_forward(request, inputs, x, math, schedule, table, launch, ("starts",))
    d = kernel_backward.chunk_backward(
        request, inputs, grads, states["starts"], x, math, schedule, table, launch
    )
    dq, dk, dv = (
        summed_like(layout.scatter(table, d[n]), a) for n, a in zip(("dq", "dk", "dv"), inputs, strict=False)
    )
    dbeta = gate.strength_backward(request, inputs.beta.astype(F32), _tokens(request, table, d["dbeta"]))
    dg, dA, dbias = _gate_grads(request, inputs, table, d)
    dinitial = d.get("dinitial")
    if dinitial is not None:
        if table is not None:
            dinitial = _or_empty(dinitial[:-1], grads.final_state, inputs.cu_seqlens)
        dinitial = summed_like(dinitial, inputs.initial_state)
    return InputGrads(dq, dk, dv, dg, summed_like(dbeta, inputs.beta), dA, dbias, dinitial)


def _tokens(request: Request, table: ChunkTable | None, lanes: Array) -> Array:
    """``[B, HV, NC * C]`` back to ``[B, T, HV]``."""
    rows = jnp.moveaxis(lanes, 2, 1)
    return rows[:, : request.T] if table is None else layout.scatter(table, rows)


def _gate_grads(
    request: Request, inputs: ChunkInputs, table: ChunkTable | None, d: dict[str, Array]
) -> tuple[Array, Array | None, Array | None]:
    """Of g, A_log and dt_bias."""
    if request.scalar_gate:
        raw = GateInputs(inputs.g, inputs.A_log, inputs.dt_bias)
        found = gate.kda_gate_backward(request, raw, _tokens(request, table, d["dg"]))
        return found.g, found.A_log, found.dt_bias
    dA = dbias = None
    if inputs.A_log is not None:
        dA = summed_like(jnp.sum(d["dA"], (0, 2)), inputs.A_log)
    if inputs.dt_bias is not None:
        dbias = summed_like(jnp.sum(d["dbias"], 0).reshape(inputs.dt_bias.shape), inputs.dt_bias)
    return summed_like(layout.scatter(table, d["dg"]), inputs.g), dA, dbias
