"""``fused_recurrent_kda`` and its GDN form: one token of every sequence at a time.

Pools are functional: the updated pool (or initial state) is returned as ``final_state``. A pack
runs its sequences side by side for as many steps as the longest has tokens; for long packs the
chunked op is the right one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, RecurrentInputs, Request
from kdacore_pallas.xla import gate, parts, state_pool
from kdacore_pallas.xla.numerics import F32, dot, mesh_axes, required, varying

Array = Any


class Tokens(NamedTuple):
    """Inputs of the recurrence, float32, tokens in one axis: ``[B*T, H, R, ...]`` (R = 1 for q and
    k)."""

    q: Array
    k: Array
    v: Array
    decay: Array
    """``exp(g)``, one channel for a scalar gate."""
    beta: Array


def _tokens(request: Request, inputs: RecurrentInputs) -> Tokens:
    H, R = request.H, request.HV // request.H

    def heads(x: Array, per: int) -> Array:
        return x.astype(F32).reshape(request.B * request.T, H, per, *x.shape[3:])

    def param(x: Array | None) -> Array | None:
        return None if x is None else x.astype(F32).reshape(H, R, -1)

    q, k = heads(inputs.q, 1), heads(inputs.k, 1)
    if request.qk_l2norm:
        q, k = gate.qk_l2norm(q), gate.qk_l2norm(k)
    g = heads(inputs.g[..., None] if request.scalar_gate else inputs.g, R)
    log = gate.log_decay(request, g, param(inputs.A_log), param(inputs.dt_bias))
    beta = gate.beta_forward(request, heads(inputs.beta, R))[..., None]
    return Tokens(q * request.scale, k, heads(inputs.v, R), jnp.exp(log), beta)


def _step(state: Array, x: Tokens) -> tuple[Array, Array]:
    """One token: the new state ``[N, H, R, K, V]`` and the output ``[N, H, R, V]``."""
    precision = lax.Precision.HIGHEST
    state = state * x.decay[..., None]
    error = x.v - dot("nhk,nhrkv->nhrv", x.k[:, :, 0], state, precision)
    state = state + x.k[..., None] * (x.beta * error)[..., None, :]
    return state, dot("nhk,nhrkv->nhrv", x.q[:, :, 0], state, precision)


def _from_pool(request: Request, states: Array) -> Array:
    """Pool rows as float32 ``[N, H, R, K, V]``."""
    states = states.astype(F32)
    if request.state_v_first:
        states = jnp.swapaxes(states, -1, -2)
    return states.reshape(-1, request.H, request.HV // request.H, request.K, request.V)


def _to_pool(request: Request, states: Array, dtype: Any) -> Array:
    """The reverse of :func:`_from_pool`."""
    if request.state_v_first:
        states = jnp.swapaxes(states, -1, -2)
    return states.reshape(-1, request.HV, *request.state_tail).astype(dtype)


def _start(request: Request, inputs: RecurrentInputs, rows: Array, axes: frozenset[str]) -> Array:
    pool = inputs.initial_state
    if pool is None:
        shape = (request.N, request.H, request.HV // request.H, request.K, request.V)
        return varying(jnp.zeros(shape, F32), axes)
    return varying(_from_pool(request, state_pool.states_read(pool, rows)), axes)


class LoopState(NamedTuple):
    state: Array
    pool: Array | None
    """The pool being rewritten; None unless a state is kept after every token."""
    o: Array
    """``[B*T, H, R, V]``."""


def _run(
    request: Request,
    inputs: RecurrentInputs,
    start: Array,
    no_slot: Array | None,
    written: Array | None,
    axes: frozenset[str],
) -> LoopState:
    """All tokens of all sequences. ``written``: the rows that the state after each token goes to."""
    x = _tokens(request, inputs)
    if request.packed:
        cu = required(inputs.cu_seqlens).astype(jnp.int32)
        first, length = cu[:-1], cu[1:] - cu[:-1]
        steps = jnp.minimum(jnp.max(length), request.T)  # wrong offsets must not cost hours
    else:
        first = jnp.arange(request.N, dtype=jnp.int32) * request.T
        length = jnp.full((request.N,), request.T, jnp.int32)
        steps = request.T
    if no_slot is not None:
        length = jnp.where(no_slot, 0, length)

    def body(t: Array, carry: LoopState) -> LoopState:
        alive = t < length
        row = jnp.where(alive, first + t, request.B * request.T)
        token = Tokens(*(jnp.take(a, row, axis=0, mode="clip") for a in x))
        state, o = _step(carry.state, token)
        if request.packed:
            state = jnp.where(alive[:, None, None, None, None], state, carry.state)
        pool: Array = carry.pool
        if written is not None:
            column = lax.dynamic_index_in_dim(written, t, 1, keepdims=False)
            rows = jnp.where(alive, column, -1)
            pool = state_pool.states_written(pool, rows, _to_pool(request, state, pool.dtype))
        return LoopState(state, pool, carry.o.at[row].set(o, mode="drop"))

    pool = None if written is None else varying(state_pool.written_pool(inputs), axes)
    o = varying(jnp.zeros((request.B * request.T, *start.shape[1:3], request.V), F32), axes)
    done: LoopState = lax.fori_loop(0, steps, body, LoopState(start, pool, o))
    return done


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """Outputs token by token. With ``inplace_state``, ``final_state`` is the updated pool."""
    axes = mesh_axes(*inputs)
    read = state_pool.rows_read(request, inputs)
    written = state_pool.rows_written(request, inputs, read.no_slot) if request.inplace_state else None
    each = written if written is not None and written.ndim == 2 else None
    done = _run(request, inputs, _start(request, inputs, read.rows, axes), read.no_slot, each, axes)
    o = done.o.reshape(request.B, request.T, request.HV, request.V).astype(inputs.v.dtype)
    if each is not None:
        return Outputs(o, done.pool)
    if written is not None:
        pool = varying(state_pool.written_pool(inputs), axes)
        states = _to_pool(request, done.state, pool.dtype)
        return Outputs(o, state_pool.states_written(pool, written, states))
    if request.output_final_state:
        state = done.state
        if read.no_slot is not None:
            state = jnp.where(read.no_slot[:, None, None, None, None], 0.0, state)
        return Outputs(o, _to_pool(request, state, request.state_dtype))
    return Outputs(o)


def backward(
    request: Request, inputs: RecurrentInputs, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """Backward by the chunked op: the same function of the same inputs (no pool here)."""
    fields = [n for n in ChunkInputs._fields if n in inputs._fields]
    return parts.backward(request, ChunkInputs(**{n: getattr(inputs, n) for n in fields}), (), grads)
