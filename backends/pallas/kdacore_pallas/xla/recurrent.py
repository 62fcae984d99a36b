"""``fused_recurrent_kda`` and its GDN form: one token of every sequence at a time.

Pools are functional: the updated pool (or initial state) is returned as ``final_state``. A pack
runs its sequences side by side for as many steps as the longest has tokens; for long packs the
chunked op is the right one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, RecurrentInputs, Request
from kdacore_pallas.xla import gate, parts, records, state_pool
from kdacore_pallas.xla.numerics import F32, dot, mesh_axes, varying
from kdacore_pallas.xla.records import Step, added, decayed
from kdacore_pallas.xla.sequences import sequences_of
from kdacore_pallas.xla.state_rows import state_rows

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


def _step(state: Array, x: Tokens) -> tuple[Array, Array, Step]:
    """One token: the new state ``[N, H, R, K, V]``, the output ``[N, H, R, V]``, and what it did."""
    precision = lax.Precision.HIGHEST
    before = decayed(state, x.decay)
    error = x.v - dot("nhk,nhrkv->nhrv", x.k[:, :, 0], before, precision)
    step = Step(x.beta * error, x.k, x.decay)
    state = added(before, step)
    return state, dot("nhk,nhrkv->nhrv", x.q[:, :, 0], state, precision), step


def from_pool(request: Request, states: Array) -> Array:
    """Pool rows as float32 ``[N, H, R, K, V]``."""
    states = states.astype(F32)
    if request.state_v_first:
        states = jnp.swapaxes(states, -1, -2)
    return states.reshape(-1, request.H, request.HV // request.H, request.K, request.V)


def to_pool(request: Request, states: Array, dtype: Any) -> Array:
    """The reverse of :func:`from_pool`."""
    if request.state_v_first:
        states = jnp.swapaxes(states, -1, -2)
    return states.reshape(-1, request.HV, *request.state_tail).astype(dtype)


def _start(request: Request, inputs: RecurrentInputs, rows: Array, axes: frozenset[str]) -> Array:
    pool = inputs.initial_state
    if pool is None:
        shape = (request.N, request.H, request.HV // request.H, request.K, request.V)
        return varying(jnp.zeros(shape, F32), axes)
    return varying(from_pool(request, state_pool.states_read(pool, rows)), axes)


class Done(NamedTuple):
    """What the recurrence of a call gives."""

    o: Array
    """``[B, T, HV, V]`` float32; zero in rows of no sequence."""
    final_state: Array | None
    """The state of each sequence, or the pool with them written; None where neither is asked for."""
    records: tuple[Array, ...]
    """With what the tokens did; empty without records."""


class LoopState(NamedTuple):
    state: Array
    pool: Array | None
    """The pool being rewritten; None unless a state is kept after every token."""
    records: tuple[Array, ...]
    o: Array
    """``[B*T, H, R, V]``."""


def _run(
    request: Request, inputs: RecurrentInputs, rows: StateRows, start: Array, axes: frozenset[str]
) -> LoopState:
    """All tokens of all sequences."""
    x = _tokens(request, inputs)
    sequences = sequences_of(request, inputs.cu_seqlens, rows.padding)

    def body(t: Array, carry: LoopState) -> LoopState:
        alive = t < sequences.length
        row = jnp.where(alive, sequences.first + t, request.B * request.T)
        token = Tokens(*(jnp.take(a, row, axis=0, mode="clip") for a in x))
        state, o, step = _step(carry.state, token)
        if request.packed:
            state = jnp.where(alive[:, None, None, None, None], state, carry.state)
        pool: Array = carry.pool
        if rows.per_token is not None:
            column = lax.dynamic_index_in_dim(rows.per_token, t, 1, keepdims=False)
            here = jnp.where(alive, column, ZEROS)
            pool = state_pool.states_written(pool, here, to_pool(request, state, pool.dtype))
        left = records.kept(carry.records, rows, t, alive, step)
        return LoopState(state, pool, left, carry.o.at[row].set(o, mode="drop"))

    pool = None if rows.per_token is None else varying(state_pool.written_pool(inputs), axes)
    kept = tuple(varying(a, axes) for a in records.arrays_of(inputs))
    o = varying(jnp.zeros((request.B * request.T, *start.shape[1:3], request.V), F32), axes)
    done: LoopState = lax.fori_loop(0, sequences.steps, body, LoopState(start, pool, kept, o))
    return done


def run(request: Request, inputs: RecurrentInputs, rows: StateRows) -> Done:
    """The recurrence of a call.

    Args:
        request: of the call.
        inputs: its arrays.
        rows: of its pool and its records.
    """
    axes = mesh_axes(*inputs)
    start = _start(request, inputs, rows.read, axes)
    if request.inplace_state:
        dtype = state_pool.written_pool(inputs).dtype
        start = records.replayed(request, inputs, rows, start, dtype, axes)
    done = _run(request, inputs, rows, start, axes)
    o = done.o.reshape(request.B, request.T, request.HV, request.V)
    if rows.per_token is not None:
        return Done(o, done.pool, done.records)
    if request.inplace_state:
        pool = varying(state_pool.written_pool(inputs), axes)
        states = to_pool(request, records.states_left(rows, start, done.state), pool.dtype)
        return Done(o, state_pool.states_written(pool, rows.final, states), done.records)
    if request.output_final_state:
        state = jnp.where(rows.padding[:, None, None, None, None], 0.0, done.state)
        return Done(o, to_pool(request, state, request.state_dtype), ())
    return Done(o, None, ())


def forward_rows(request: Request, inputs: RecurrentInputs, rows: StateRows) -> Outputs:
    """Outputs token by token. With ``inplace_state``, ``final_state`` is the updated pool."""
    done = run(request, inputs, rows)
    return Outputs(done.o.astype(inputs.v.dtype), done.final_state, written=done.records)


def forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """:func:`forward_rows`, the rows read on the device."""
    return forward_rows(request, inputs, state_rows(request, inputs))


def backward(
    request: Request, inputs: RecurrentInputs, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """Backward by the chunked op: the same function of the same inputs (no pool here)."""
    fields = [n for n in ChunkInputs._fields if n in inputs._fields]
    return parts.backward(request, ChunkInputs(**{n: getattr(inputs, n) for n in fields}), (), grads)
