"""Backward of the chunked ops: segments from the last to the first, each recomputed from the raw
inputs.

The state at each segment's start and the interactions within chunks are saved by the forward (or
computed again, by a pass over the states), so memory is linear in T with a small constant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_pallas.gate_rates import SHRINK, held_as
from kdacore_pallas.xla import chunk_forward, gate, segment
from kdacore_pallas.xla.intra import unpacked
from kdacore_pallas.xla.numerics import (
    F32,
    dot,
    dots,
    fusion_barrier,
    mesh_axes,
    product_precision,
    required,
    summed_like,
    total,
    varying,
)
from kdacore_pallas.xla.plan import ChunkPlan, make_plan
from kdacore_pallas.xla.saved_apart import SavedApart
from kdacore_pallas.xla.saved_layout import GradBuffers, SavedLayout

Array = Any


def _scan_states(
    plan: ChunkPlan,
    prep: segment.Prepared,
    state: Array,
    flag: chunk_forward.Flags,
    initial: Array,
    precision: lax.Precision,
    v_new: Array | None = None,
) -> tuple[Array, chunk_forward.SegmentStates]:
    w, u = (prep.w, prep.u) if v_new is None else (None, None)
    parts = chunk_forward.StateParts(w, u, prep.kg, prep.decay.total)
    buffers = chunk_forward.Buffers(None, None)
    end, _, states = chunk_forward.scan_states(plan, parts, state, buffers, flag, initial, precision, v_new)
    return end, states


class StateGrads(NamedTuple):
    """Result of the reverse scan over a segment's chunks."""

    end: Array
    """``[M, R, K, V]`` gradient of each chunk's end state."""
    v_new: Array
    """``[M, R, C, V]``."""


def reverse(
    plan: ChunkPlan,
    prep: segment.Prepared,
    do: Array,
    dstate: Array,
    dinitial: Array | None,
    flag: chunk_forward.Flags,
    dfinal: Array | None,
    precision: lax.Precision,
) -> tuple[Array, Array | None, StateGrads]:
    """Carry the gradient of the state from the segment's end to its start."""
    local = dot("...ij,...iv->...jv", prep.pair.qk, do, precision)

    def step(carry: tuple[Array, Any], x: Any) -> tuple[tuple[Array, Any], StateGrads]:
        running, rows = carry
        w, qg, kg, total, do_, local_, at = x
        end = running
        if at.last is not None:
            own = jnp.zeros_like(running)
            if dfinal is not None:
                own = lax.dynamic_index_in_dim(
                    dfinal, jnp.minimum(at.seq, dfinal.shape[0] - 1), keepdims=False
                )
                own = jnp.where(at.seq < dfinal.shape[0], own, 0.0)
            end = jnp.where(at.last, own, running)
        dv = local_ + dot("...ck,...kv->...cv", kg, end, precision)
        # Two products of C rows: one of 2 C is several times slower on a CPU than both together.
        start = end * jnp.swapaxes(total, -1, -2) + dot("...ck,...cv->...kv", qg, do_, precision)
        start = start - dot("...ck,...cv->...kv", w, dv, precision)
        if rows is not None and at.first is not None:
            row = jnp.where(at.first, at.seq, rows.shape[0] - 1)
            rows = lax.dynamic_update_index_in_dim(rows, start, row, 0)
        return (start, rows), StateGrads(end, dv)

    xs = tuple(plan.per_chunk(x) for x in (prep.w, prep.qg, prep.kg, prep.decay.total, do, local))
    (dstate, dinitial), (end, dv) = lax.scan(step, (dstate, dinitial), (*xs, flag), reverse=True)
    return dstate, dinitial, StateGrads(end.reshape(plan.M, *end.shape[2:]), dv.reshape(do.shape))


class RowGrads(NamedTuple):
    """Gradients of :class:`segment.Rows`, q and k still per value head."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


def _rows_backward(
    request: Request,
    rows: segment.Rows,
    prep: segment.Prepared,
    states: chunk_forward.SegmentStates,
    grads: StateGrads,
    do: Array,
    precision: lax.Precision,
) -> RowGrads:
    """All chunks of a segment at once: from state and value gradients to those of the rows."""
    decay, pair = prep.decay, prep.pair
    C = do.shape[-2]
    scalar = decay.prefix.shape[-1] == 1

    def channels(x: Array) -> Array:
        return total(x, -1) if scalar else x

    dkg = dot("...cv,...kv->...ck", states.v_new, grads.end, precision)
    dtotal = jnp.swapaxes(total(states.start * grads.end, -1), -1, -2) * decay.total

    # w = inverse @ right_w, u = inverse @ right_u, v_new = u - w @ start,
    # inverse = (I + L)^-1, L = diag(beta) kk.
    # Hence dright_w = -dright_u @ start^T and
    # dL = -dright_w @ w^T - dright_u @ u^T = -dright_u @ v_new^T.
    dright_u = dot("...ji,...jv->...iv", pair.inverse, grads.v_new, precision)
    both = (dright_u, do)
    less_w, dqg = dots(request, "...cv,...kv->...ck", both, states.start, precision)  # -dright_w
    dL, dqk = dots(request, "...iv,...jv->...ij", both, states.v_new, precision)
    lower = jnp.tril(jnp.ones((C, C), bool))
    dL = jnp.where(jnp.tril(lower, -1), -dL, 0.0)
    dqk = jnp.where(lower, dqk, 0.0)

    kp = rows.k * decay.prefix
    dbeta = total(dL * pair.kk, -1) + total(dright_u * rows.v, -1)
    dbeta -= total(less_w * kp, -1)
    intra = segment.within_chunks(request).interactions_backward(
        rows.q,
        rows.k,
        decay,
        dqk,
        rows.beta * dL,
        channels(prep.qg * dqg - rows.beta * kp * less_w),
        channels(prep.kg * dkg),
        channels(dtotal),
        precision,
    )
    dq = intra.q + dqg * decay.prefix
    dk = intra.k - rows.beta * decay.prefix * less_w + dkg * decay.suffix
    return RowGrads(dq, dk, rows.beta * dright_u, intra.g, dbeta)


class ParamGrads(NamedTuple):
    A_log: Array | None
    """``[H, R]``, running sum."""
    dt_bias: Array | None
    """``[H, R, K]`` (or 1), running sum; times SHRINK of a bounded gate."""


def _raw_backward(
    request: Request, plan: ChunkPlan, raw: segment.Raw, params: segment.Params, d: RowGrads, sums: ParamGrads
) -> tuple[segment.Raw, ParamGrads]:
    """Gradients of the raw inputs from those of the rows: scale, mask, l2norm, gate and beta. Those
    of q and k are summed over their value heads."""
    dq, dk, dv, dg, dbeta = d
    if raw.mask is not None:
        dg = jnp.where(raw.mask, dg, 0.0)
    if request.packed:  # the padding rows of a dense call come last and are dropped
        dq, dk, dv, dbeta = (jnp.where(raw.mask, x, 0.0) for x in (dq, dk, dv, dbeta))
    dq = jnp.sum(dq, 1, keepdims=True) * request.scale
    dk = jnp.sum(dk, 1, keepdims=True)
    if request.qk_l2norm:
        dq, dk = gate.qk_l2norm_backward(raw.q, dq), gate.qk_l2norm_backward(raw.k, dk)
    dbeta = gate.beta_backward(request, raw.beta, dbeta)
    log = gate.log_decay_backward(request, raw.g, params.A_log, params.dt_bias, dg)
    dA, db = sums
    if dA is not None:
        dA = dA + jnp.sum(total(total(log.A_log, -1), -2).reshape(-1, plan.H, plan.R), 0)
    if db is not None:
        terms = log.g * SHRINK if request.gate == "sigmoid" else log.g
        db = db + jnp.sum(total(terms, -2).reshape(-1, plan.H, plan.R, terms.shape[-1]), 0)
    return segment.Raw(dq, dk, dv, log.g, dbeta, None), ParamGrads(dA, db)


def _segment_starts(
    request: Request,
    plan: ChunkPlan,
    arrays: ChunkInputs,
    params: segment.Params,
    initial: Array,
    layout: SavedLayout | SavedApart,
) -> GradBuffers:
    """Buffers with the state at each segment's start, when the forward saved none."""
    precision = product_precision(request)

    def body(carry: tuple[Array, GradBuffers], s: Array) -> tuple[tuple[Array, GradBuffers], None]:
        state, buffers = carry
        prep = segment.prepare(
            request,
            segment.recurrence_rows(request, segment.load(request, arrays, plan, s), params),
            precision,
        )
        end, _ = _scan_states(plan, prep, state, chunk_forward.sequence_flags(plan, s), initial, precision)
        return (end, layout.store(buffers, s, (state,))), None

    order = jnp.arange(plan.segments, dtype=jnp.int32)
    carry = (chunk_forward.start_state(plan, initial), layout.new_buffers(mesh_axes(initial)))
    found: GradBuffers
    (_, found), _ = lax.scan(body, carry, order)
    return found


def padded_gradient(request: Request, inputs: ChunkInputs, plan: ChunkPlan, do: Array | None) -> Array:
    """The gradient of the outputs, zeros if it is None, in whole segments."""
    do = jnp.zeros_like(inputs.v) if do is None else do
    return fusion_barrier(request, plan.pad(do)) if plan.padded else do


def segment_gradient(request: Request, plan: ChunkPlan, raw: segment.Raw, do: Array, s: Array) -> Array:
    """Segment ``s`` of it, float32, zero in rows that are not tokens."""
    rows = plan.load(do, s).astype(F32)
    return jnp.where(raw.mask, rows, 0.0) if request.packed else rows


def backward(
    request: Request, inputs: ChunkInputs, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """Gradients of every input. ``saved`` may be ``()``: the segment states are then computed
    again."""
    axes = mesh_axes(*inputs, grads.o, grads.final_state)
    plan = make_plan(request, inputs.cu_seqlens)
    precision = product_precision(request)
    params = segment.gate_params(inputs, plan)
    arrays = chunk_forward.padded(request, chunk_forward.with_channels(request, inputs), plan)
    initial = chunk_forward.states_in(request, plan, inputs.initial_state, axes)
    layout = chunk_forward.saved_layout(request, plan, inputs, initial, states_only=not saved)
    if saved:
        buffers = dict(zip(layout.used, saved, strict=True))
    else:
        buffers = _segment_starts(request, plan, arrays, params, initial, layout)
    do = padded_gradient(request, inputs, plan, grads.o)
    dfinal = None
    if grads.final_state is not None:
        dfinal = chunk_forward.states_in(request, plan, grads.final_state, axes)

    def body(carry: Any, s: Array) -> tuple[Any, None]:
        dstate, dinitial, sums, buffers = carry
        start, *more = layout.load(buffers, s)
        raw = segment.load(request, arrays, plan, s)
        rows = segment.recurrence_rows(request, raw, params, in_backward=True)
        prep = segment.prepare(request, rows, precision, unpacked(*more[:2]) if more else None)
        flag = chunk_forward.sequence_flags(plan, s)
        _, states = _scan_states(plan, prep, start, flag, initial, precision, *more[2:])
        do_ = segment_gradient(request, plan, raw, do, s)
        dstate, dinitial, state_grads = reverse(plan, prep, do_, dstate, dinitial, flag, dfinal, precision)
        d = _rows_backward(request, rows, prep, states, state_grads, do_, precision)
        draw, sums = _raw_backward(request, plan, raw, params, d, sums)
        out = _segment_gradients(plan, draw, inputs, axes)
        out = fusion_barrier(request, out) if plan.segments == 1 else out
        return (dstate, dinitial, sums, layout.write_gradients(buffers, s, out)), None

    buffers = {n: varying(x, axes) for n, x in buffers.items()}
    for n, like in enumerate(inputs[:5]):
        if n not in buffers:
            buffers[n] = layout.new_buffer(n, _gradient_dtype(like, axes), axes)
    carry = (*reverse_carry(request, plan, inputs, dfinal, initial, axes), buffers)
    order = jnp.arange(plan.segments, dtype=jnp.int32)
    (dstate, dinitial, sums, d), _ = lax.scan(body, carry, order, reverse=True)
    return _collect(request, plan, inputs, d, dstate, dinitial, sums)


def _gradient_dtype(like: Array, axes: frozenset[str]) -> Any:
    """The dtype of an input's gradient: that of a replicated input stays float32 until it is summed
    over the mesh."""
    return F32 if axes - mesh_axes(like) else like.dtype


def _segment_gradients(
    plan: ChunkPlan, d: segment.Raw, inputs: ChunkInputs, axes: frozenset[str]
) -> tuple[Array, ...]:
    """A segment's gradients in token order and in the dtypes they are returned in."""
    dg = held_as(d.g, inputs.g.dtype).astype(F32) if inputs.g.dtype != F32 else d.g
    pairs = zip((d.q, d.k, d.v, dg, d.beta[..., 0]), inputs[:5], strict=True)
    return tuple(plan.in_order(varying(x, axes).astype(_gradient_dtype(like, axes))) for x, like in pairs)


def reverse_carry(
    request: Request,
    plan: ChunkPlan,
    inputs: ChunkInputs,
    dfinal: Array | None,
    initial: Array,
    axes: frozenset[str],
) -> tuple[Array, Array | None, ParamGrads]:
    dlast = jnp.zeros_like(initial) if dfinal is None else dfinal
    dstate = chunk_forward.start_state(plan, dlast)
    dinitial = None
    if plan.table is not None and inputs.initial_state is not None:
        dinitial = jnp.concatenate([dlast, jnp.zeros_like(dlast[:1])])
    dA = None if inputs.A_log is None else varying(jnp.zeros((plan.H, plan.R), F32), axes)
    db = None
    if inputs.dt_bias is not None:
        channels = 1 if request.scalar_gate else request.K
        db = varying(jnp.zeros((plan.H, plan.R, channels), F32), axes)
    return dstate, dinitial, ParamGrads(dA, db)


def _collect(
    request: Request,
    plan: ChunkPlan,
    inputs: ChunkInputs,
    d: GradBuffers,
    dstate: Array,
    dinitial: Array | None,
    sums: ParamGrads,
) -> InputGrads:
    q, k, v, g, beta = (
        summed_like(plan.unload(d[n], *like.shape[2:]), like) for n, like in enumerate(inputs[:5])
    )
    dA = db = ds = None
    if inputs.A_log is not None:
        dA = summed_like(required(sums.A_log).reshape(inputs.A_log.shape), inputs.A_log)
    if inputs.dt_bias is not None:
        db = required(sums.dt_bias).reshape(inputs.dt_bias.shape)
        if request.gate == "sigmoid":
            db = held_as(db * (1.0 / SHRINK), F32)
        db = summed_like(held_as(db, inputs.dt_bias.dtype), inputs.dt_bias)
    if inputs.initial_state is not None:
        # Empty sequences were never visited: their row still holds the gradient of their final
        # state.
        rows = dstate if plan.table is None else required(dinitial)[:-1]
        ds = summed_like(chunk_forward.states_out(request, rows, request.N), inputs.initial_state)
    return InputGrads(q, k, v, g, beta, dA, db, ds)
