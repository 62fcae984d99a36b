"""The five stage ops of the chunk pipeline. Each treats the whole call as one segment."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from kdacore.types import (
    ChunkGateInputs,
    ChunkInputs,
    ChunkOutputInputs,
    ChunkStateInputs,
    ChunkStateOutputs,
    IntraInputs,
    IntraOutputs,
    RecomputeInputs,
    RecomputeOutputs,
    Request,
)
from kdacore_pallas.gate_rates import LARGEST
from kdacore_pallas.xla import chunk_forward, gate, segment
from kdacore_pallas.xla.numerics import F32, dot, mesh_axes, product_precision, required
from kdacore_pallas.xla.plan import ChunkPlan, chunk_table

Array = Any
LN2 = math.log(2.0)


def _plan(request: Request, cu_seqlens: Array | None) -> ChunkPlan:
    """One segment holding every chunk."""
    C, G = request.chunk_size, request.num_chunks
    table = chunk_table(cu_seqlens, request.T, C, G) if request.packed else None
    return ChunkPlan(request.B, request.T, request.N, request.H, request.HV // request.H, C, G, 1, table)


def _load(plan: ChunkPlan, x: Array) -> Array:
    """``[B, T, heads, ...]`` as ``[M, R, C, ...]`` float32, zero where there is no token."""
    rows = plan.load(plan.pad(x), jnp.int32(0)).astype(F32)
    mask = plan.mask(jnp.int32(0))
    if mask is None:
        return rows
    return jnp.where(mask[..., 0] if rows.ndim == 3 else mask, rows, 0.0)


def _unload(plan: ChunkPlan, x: Array) -> Array:
    return plan.unload(plan.in_order(x)[None], plan.H * x.shape[1], *x.shape[3:])


def _log_decay(plan: ChunkPlan, gc: Array) -> Array:
    """Natural-log decay of each row from log2 sums; zero where there is no token."""
    rows = _load(plan, gc)
    before = jnp.concatenate([jnp.zeros_like(rows[:, :, :1]), rows[:, :, :-1]], axis=2)
    mask = plan.mask(jnp.int32(0))
    step = (rows - before) * LN2
    return step if mask is None else jnp.where(mask, step, 0.0)


def chunk_gate(request: Request, inputs: ChunkGateInputs) -> Array:
    """``gc`` ``[B, T, HV, K]`` float32: log2 decay summed from each chunk's first row."""
    plan = _plan(request, inputs.cu_seqlens)
    as_chunk = ChunkInputs(None, None, None, inputs.g, None, inputs.A_log, inputs.dt_bias)
    params = segment.gate_params(as_chunk, plan)
    log = gate.log_decay(request, _load(plan, inputs.g), params.A_log, params.dt_bias)
    return _unload(plan, jnp.maximum(jnp.cumsum(log * (1.0 / LN2), axis=2), -LARGEST))


def chunk_intra(request: Request, inputs: IntraInputs) -> IntraOutputs:
    """``Aqk`` and ``Akk`` ``[B, T, HV, C]`` float32."""
    plan = _plan(request, inputs.cu_seqlens)
    q, k, beta = (_load(plan, x) for x in (inputs.q, inputs.k, inputs.beta))
    decay = segment.within_chunks(request).decays(_log_decay(plan, inputs.gc))
    pair = segment.within_chunks(request).interactions(
        q * request.scale, k, beta[..., None], decay, product_precision(request)
    )
    return IntraOutputs(_unload(plan, pair.qk), _unload(plan, pair.inverse))


def recompute_w_u(request: Request, inputs: RecomputeInputs) -> RecomputeOutputs:
    """``w``, ``u``, ``kg`` (and ``qg``) ``[B, T, HV, K or V]`` float32."""
    plan = _plan(request, inputs.cu_seqlens)
    precision = product_precision(request)
    k, v, beta, inverse = (_load(plan, x) for x in (inputs.k, inputs.v, inputs.beta, inputs.Akk))
    decay = segment.within_chunks(request).decays(_log_decay(plan, inputs.gc))
    beta = beta[..., None]
    w = dot("...ij,...jk->...ik", inverse, beta * k * decay.prefix, precision)
    u = dot("...ij,...jk->...ik", inverse, beta * v, precision)
    qg = None if inputs.q is None else _unload(plan, _load(plan, inputs.q) * decay.prefix)
    return RecomputeOutputs(_unload(plan, w), _unload(plan, u), _unload(plan, k * decay.suffix), qg)


def chunk_state(request: Request, inputs: ChunkStateInputs) -> ChunkStateOutputs:
    """``h`` ``[B, NT, HV, K, V]`` float32 at each chunk's start, ``v_new`` ``[B, T, HV, V]``, the
    last states."""
    plan = _plan(request, inputs.cu_seqlens)
    kg, w, u = (_load(plan, x) for x in (inputs.kg, inputs.w, inputs.u))
    total = segment.within_chunks(request).decays(_log_decay(plan, inputs.gc)).total
    initial = chunk_forward.states_in(request, plan, inputs.initial_state, mesh_axes(*inputs))
    parts = chunk_forward.StateParts(w, u, kg, total)
    flag = chunk_forward.sequence_flags(plan, jnp.int32(0))
    buffers = chunk_forward.state_buffers(request, plan, initial)
    state = chunk_forward.start_state(plan, initial)
    end, buffers, states = chunk_forward.scan_states(
        plan, parts, state, buffers, flag, initial, product_precision(request)
    )
    h = states.start.reshape(plan.G, plan.B, request.HV, request.K, request.V)
    if plan.table is not None:
        h = jnp.where((plan.table.seq < plan.N)[:, None, None, None, None], h, 0.0)
        end = required(buffers.final)[:-1]
    final = chunk_forward.states_out(request, end, request.N)
    return ChunkStateOutputs(jnp.moveaxis(h, 1, 0), _unload(plan, states.v_new), final)


def chunk_output(request: Request, inputs: ChunkOutputInputs) -> Array:
    """``o`` ``[B, T, HV, V]`` in the dtype of ``v_new``."""
    plan = _plan(request, inputs.cu_seqlens)
    precision = product_precision(request)
    q, v_new, Aqk = (_load(plan, x) for x in (inputs.q, inputs.v_new, inputs.Aqk))
    prefix = segment.within_chunks(request).decays(_log_decay(plan, inputs.gc)).prefix
    h = jnp.moveaxis(inputs.h.astype(F32), 1, 0).reshape(plan.M, plan.R, request.K, request.V)
    o = dot("...ck,...kv->...cv", q * prefix * request.scale, h, precision)
    o = o + dot("...ij,...jv->...iv", Aqk, v_new, precision)
    return _unload(plan, o).astype(inputs.v_new.dtype)
