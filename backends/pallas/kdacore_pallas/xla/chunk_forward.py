"""``chunk_kda`` and ``chunk_gated_delta_rule`` forward: a scan over segments, and in each a scan
over chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_pallas.xla import checkpoint_offsets, segment, state_pool
from kdacore_pallas.xla.intra import packed
from kdacore_pallas.xla.numerics import (
    F32,
    dot,
    dots,
    fusion_barrier,
    mesh_axes,
    product_precision,
    required,
    varying,
)
from kdacore_pallas.xla.plan import ChunkPlan, HeadRange, make_plan
from kdacore_pallas.xla.saved_apart import SavedApart, make_saved_apart
from kdacore_pallas.xla.saved_layout import SavedLayout, make_saved_layout

Array = Any


class Flags(NamedTuple):
    """Per chunk of a segment (leading axis G): what happens to the state before and after it. None:
    nothing."""

    first: Array | None
    """Start from the initial state of ``seq``; None for dense inputs."""
    last: Array | None
    seq: Array | None
    checkpoint: Array | None
    """Row of the checkpoint buffer for the chunk's start state; None when none are wanted."""
    at_offset: Array | None = None
    """The same for the buffer of chunks that hold a token of ``checkpoint_offsets``."""


class Buffers(NamedTuple):
    """Arrays of states that the scan writes; the last row of each takes the writes to be discarded."""

    final: Array | None
    """``[N+1, H, R, K, V]`` of a pack."""
    checkpoints: Array | None
    """``[rows+1, B*H, R, K, V]``."""
    at_offsets: Array | None = None
    """``[count+1, H, R, K, V]``: start states of the chunks that hold a token of
    ``checkpoint_offsets``."""


def with_channels(request: Request, inputs: ChunkInputs) -> ChunkInputs:
    """Inputs whose scalar gate got a channel axis of one."""
    return inputs._replace(g=inputs.g[..., None]) if request.scalar_gate else inputs


def select_heads(inputs: ChunkInputs, plan: ChunkPlan) -> tuple[ChunkInputs, ChunkPlan]:
    """Inputs and plan of the plan's range of heads.

    Arrays of tokens are sliced by :meth:`ChunkPlan.rows`. Where padding copies them, they are
    sliced here instead, so that only the range is copied.
    """
    heads = plan.head_range
    if heads is None:
        return inputs, plan
    bias = inputs.dt_bias
    inputs = inputs._replace(
        A_log=plan.take_heads(inputs.A_log, 0),
        dt_bias=plan.take_heads(None if bias is None else bias.reshape(heads.total * plan.R, -1), 0),
        initial_state=plan.take_heads(inputs.initial_state, 1),
    )
    if not plan.padded:
        return inputs, plan
    tokens = {n: plan.take_heads(getattr(inputs, n), 2) for n in ("q", "k", "v", "g", "beta")}
    return inputs._replace(**tokens), replace(plan, head_range=None)


def padded(request: Request, inputs: ChunkInputs, plan: ChunkPlan) -> ChunkInputs:
    inputs = inputs._replace(**{n: plan.pad(getattr(inputs, n)) for n in ("q", "k", "v", "g", "beta")})
    return fusion_barrier(request, inputs) if plan.padded else inputs


def states_in(request: Request, plan: ChunkPlan, state: Array | None, axes: frozenset[str]) -> Array:
    """The caller's states (or zeros) as float32 ``[N, H, R, K, V]``."""
    shape = (request.N, plan.H, plan.R, request.K, request.V)
    if state is None:
        return varying(jnp.zeros(shape, F32), axes)
    state = state.astype(F32)
    if request.state_v_first:
        state = jnp.swapaxes(state, -1, -2)
    return varying(state.reshape(shape), axes)


def states_out(request: Request, state: Array, *lead: int) -> Array:
    """Float32 ``[..., K, V]`` of ``lead`` x heads states to ``[*lead, HV, ...]`` in the caller's
    layout and dtype."""
    if request.state_v_first:
        state = jnp.swapaxes(state, -1, -2)
    return state.reshape(*lead, request.HV, *request.state_tail).astype(request.state_dtype)


def sequence_flags(plan: ChunkPlan, s: Array) -> Flags:
    """Where sequences begin and end in segment ``s``; no checkpoints."""
    if plan.table is None:
        return Flags(None, None, None, None)
    table = (plan.table.first, plan.table.last, plan.table.seq)
    first, last, seq = (lax.dynamic_slice_in_dim(x, s * plan.G, plan.G) for x in table)
    return Flags(first, last, seq, None)


def flags(
    request: Request,
    plan: ChunkPlan,
    s: Array,
    cu_seqlens: Array | None,
    at: checkpoint_offsets.Places | None = None,
) -> Flags:
    """Flags of segment ``s``, with the checkpoint rows when the call wants them."""
    flag = sequence_flags(plan, s)
    if at is not None:
        chunks = s * plan.G + jnp.arange(plan.G, dtype=jnp.int32)
        flag = flag._replace(at_offset=checkpoint_offsets.buffer_rows(at, chunks))
    every = request.checkpoint_every // plan.C
    if not every:
        return flag
    if plan.table is None:
        slot = s * plan.G + jnp.arange(plan.G, dtype=jnp.int32)
        wanted = (slot % every == 0) & (slot * plan.C < plan.T)
        return flag._replace(checkpoint=jnp.where(wanted, slot // every, request.checkpoint_shape[1]))
    cu = required(cu_seqlens).astype(jnp.int32)
    blocks = (cu[1:] - cu[:-1] + request.checkpoint_every - 1) // request.checkpoint_every
    base = jnp.append(jnp.cumsum(blocks) - blocks, 0)
    local = lax.dynamic_slice_in_dim(plan.table.local, s * plan.G, plan.G)
    wanted = (required(flag.seq) < plan.N) & (local % every == 0)
    row = jnp.where(wanted, base[flag.seq] + local // every, request.checkpoint_shape[0])
    return flag._replace(checkpoint=row)


def chunk_start(state: Array, flag: Flags, initial: Array) -> Array:
    """The state a chunk starts from: the running one ``[B*H, R, K, V]``, or its sequence's initial
    state."""
    if flag.first is None:
        return state
    own = lax.dynamic_index_in_dim(initial, jnp.minimum(flag.seq, initial.shape[0] - 1), keepdims=False)
    return jnp.where(flag.first, own, state)


def record_states(buffers: Buffers, flag: Flags, start: Array, end: Array) -> Buffers:
    """Write a chunk's start and end states to the rows that its flags name."""
    final, checkpoints, at_offsets = buffers
    if final is not None:
        row = jnp.where(flag.last, flag.seq, final.shape[0] - 1)
        final = lax.dynamic_update_index_in_dim(final, end, row, 0)
    if checkpoints is not None:
        checkpoints = lax.dynamic_update_index_in_dim(checkpoints, start, flag.checkpoint, 0)
    if at_offsets is not None:
        at_offsets = lax.dynamic_update_index_in_dim(at_offsets, start, flag.at_offset, 0)
    return Buffers(final, checkpoints, at_offsets)


class StateParts(NamedTuple):
    """What the states of a segment depend on, ``[M, R, C, ...]``. ``w`` and ``u`` are not read if
    v_new is passed."""

    w: Array | None
    u: Array | None
    kg: Array
    total: Array


class SegmentStates(NamedTuple):
    """The states of a segment and its corrected values."""

    start: Array
    """``[M, R, K, V]`` state each chunk starts from."""
    v_new: Array
    """``[M, R, C, V]`` corrected values."""


def scan_states(
    plan: ChunkPlan,
    parts: StateParts,
    state: Array,
    buffers: Buffers,
    flag: Flags,
    initial: Array,
    precision: lax.Precision,
    v_new: Array | None = None,
) -> tuple[Array, Buffers, SegmentStates]:
    """Compute the states of one segment without its outputs. ``v_new``: the corrected values, if
    they were saved."""

    def step(carry: tuple[Array, Buffers], x: Any) -> tuple[tuple[Array, Buffers], SegmentStates]:
        running, rows = carry
        (w, u, kg, total), new, at = x
        start = chunk_start(running, at, initial)
        new = u - dot("...ck,...kv->...cv", w, start, precision) if new is None else new
        end = segment.next_state(start, new, kg, total, precision)
        return (end, record_states(rows, at, start, end)), SegmentStates(start, new)

    xs = jax.tree.map(plan.per_chunk, (parts, v_new))
    (state, buffers), found = lax.scan(step, (state, buffers), (*xs, flag))
    return state, buffers, SegmentStates(*(x.reshape(plan.M, *x.shape[2:]) for x in found))


def _segment_forward(
    request: Request,
    plan: ChunkPlan,
    prep: segment.Prepared,
    state: Array,
    buffers: Buffers,
    flag: Flags,
    initial: Array,
    precision: lax.Precision,
) -> tuple[Array, Buffers, Array, Array]:
    """Run the chunks of one segment; the outputs and the corrected values are ``[M, R, C, V]``."""

    def step(carry: tuple[Array, Buffers], x: Any) -> tuple[tuple[Array, Buffers], tuple[Array, Array]]:
        running, rows = carry
        w, qg, u, kg, qk, total, at = x
        start = chunk_start(running, at, initial)
        read, o = dots(request, "...ck,...kv->...cv", (w, qg), start, precision)
        v_new = u - read
        o = o + dot("...ij,...jv->...iv", qk, v_new, precision)
        end = segment.next_state(start, v_new, kg, total, precision)
        return (end, record_states(rows, at, start, end)), (o, v_new)

    parts = (prep.w, prep.qg, prep.u, prep.kg, prep.pair.qk, prep.decay.total)
    xs = tuple(plan.per_chunk(x) for x in parts)
    (state, buffers), (o, v_new) = lax.scan(step, (state, buffers), (*xs, flag))
    return state, buffers, o.reshape(prep.u.shape), v_new.reshape(prep.u.shape)


def start_state(plan: ChunkPlan, initial: Array) -> Array:
    """The running state before the first chunk, ``[B*H, R, K, V]``; in a pack it is never read."""
    if plan.table is None:
        return initial.reshape(plan.B * plan.H, *initial.shape[2:])
    return jnp.zeros_like(initial[0])


def state_buffers(request: Request, plan: ChunkPlan, initial: Array) -> Buffers:
    final = checkpoints = at_offsets = None

    def rows_of_states(count: int) -> Array:
        one = jnp.zeros_like(start_state(plan, initial))
        return jnp.broadcast_to(one, (count, *one.shape))

    if request.packed and request.output_final_state:
        final = jnp.concatenate([initial, jnp.zeros_like(initial[:1])])
    if request.checkpoint_every:
        checkpoints = rows_of_states(request.checkpoint_shape[0 if request.packed else 1] + 1)
    if request.checkpoint_count:
        at_offsets = rows_of_states(request.checkpoint_count + 1)
    return Buffers(final, checkpoints, at_offsets)


def outputs(request: Request, plan: ChunkPlan, o: Array, state: Array, buffers: Buffers) -> Outputs:
    """The call's results, from stacked segments of outputs, the last state and the buffers."""
    final = checkpoints = None
    if request.output_final_state:
        final = states_out(request, required(buffers.final)[:-1] if request.packed else state, request.N)
    if request.checkpoint_every:
        kept = required(buffers.checkpoints)[:-1]
        rows = states_out(request, kept, kept.shape[0], request.B)
        checkpoints = rows[:, 0] if request.packed else jnp.moveaxis(rows, 1, 0)
    return Outputs(plan.unload(o, request.HV, request.V), final, checkpoints)


def with_states_at_offsets(request: Request, out: Outputs, states: Array) -> Outputs:
    """``out`` with the states at ``checkpoint_offsets`` after its last states."""
    rows = states_out(request, states, states.shape[0])
    return out._replace(final_state=jnp.concatenate([required(out.final_state), rows]))


def saved_layout(
    request: Request, plan: ChunkPlan, inputs: ChunkInputs, initial: Array, states_only: bool = False
) -> SavedLayout | SavedApart:
    """Layout of the arrays that the forward saves: the state at each segment's start and, unless
    ``states_only``, the interactions as :func:`packed` and, if they fit as well, the corrected
    values.
    """
    state = (plan.B * plan.H, *initial.shape[2:])
    if request.device.type == "tpu":
        return make_saved_apart(plan, inputs, state, states_only)
    pair = (plan.M, plan.R, plan.C, plan.C)
    v_new = (plan.M, plan.R, plan.C, initial.shape[-1])
    if states_only:
        return make_saved_layout(plan, inputs, (state,))
    return make_saved_layout(plan, inputs, (state, pair, pair), (v_new,))


def forward(request: Request, inputs: ChunkInputs, head_range: HeadRange | None = None) -> Outputs:
    """Outputs of the chunked op, or of a range of its heads: ``request`` then describes a call of
    those heads.

    The pool arguments of a call have been resolved (:mod:`.state_pool`): states ``[N, ...]`` come in,
    the last states and after them those at ``checkpoint_offsets`` go out.

    When gradients are wanted, ``saved`` holds the buffers of :func:`saved_layout`.
    """
    axes = mesh_axes(*inputs)
    no_slot = state_pool.no_slot(inputs)
    plan = make_plan(request, inputs.cu_seqlens, head_range=head_range, no_slot=no_slot)
    precision = product_precision(request)
    inputs, plan = select_heads(inputs, plan)
    at = checkpoint_offsets.places(plan, inputs)
    params = segment.gate_params(inputs, plan)
    arrays = padded(request, with_channels(request, inputs), plan)
    initial = states_in(request, plan, inputs.initial_state, axes)

    layout = saved_layout(request, plan, inputs, initial) if request.needs_grad else None

    def body(carry: Any, s: Array) -> tuple[Any, Array]:
        state, buffers, saved = carry
        rows = segment.recurrence_rows(request, segment.load(request, arrays, plan, s), params)
        prep = segment.prepare(request, rows, precision)
        flag = flags(request, plan, s, inputs.cu_seqlens, at)
        end, buffers, o, v_new = _segment_forward(
            request, plan, prep, state, buffers, flag, initial, precision
        )
        if layout is not None:
            saved = layout.store(saved, s, (state, *packed(prep.pair), v_new))
        return (end, buffers, saved), plan.in_order(o.astype(inputs.v.dtype))

    saved = {} if layout is None else layout.new_buffers(axes)
    carry = (start_state(plan, initial), state_buffers(request, plan, initial), saved)
    (state, buffers, saved), o = segment.scan_segments(request, plan, body, carry, axes)
    out = outputs(request, plan, o, state, buffers)._replace(saved=tuple(saved.values()))
    if at is None:
        return out
    starts = required(buffers.at_offsets)
    states = checkpoint_offsets.states(request, arrays, plan, at, starts, precision, axes)
    return with_states_at_offsets(request, out, states)
