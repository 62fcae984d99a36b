"""``fused_recurrent_kda`` and its GDN form by the recurrent kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.options import kernel_options
from kdacore_pallas.tpu.recurrent_kernel import RecurrentPlan, make_recurrent_plan, recurrent_kernel
from kdacore_pallas.xla import state_pool
from kdacore_pallas.xla.numerics import required
from kdacore_pallas.xla.state_pool import RowsRead

Array = Any


def token_owners(request: Request, cu_seqlens: Array | None) -> tuple[Array, Array, Array]:
    """Per token, int32 ``[B * T]``: its sequence, its place in it, and the length of that sequence.
    A token of no sequence has a place past the end of the last one."""
    token = jnp.arange(request.B * request.T, dtype=jnp.int32)
    if cu_seqlens is None:
        return token // request.T, token % request.T, jnp.full_like(token, request.T)
    cu = cu_seqlens.astype(jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(cu[1:], token, side="right"), request.N - 1).astype(jnp.int32)
    return seq, token - cu[seq], (cu[1:] - cu[:-1])[seq]


def plan_recurrent(request: Request, inputs: RecurrentInputs, read: RowsRead) -> RecurrentPlan:
    """The rows that each token's state is read from and written to; none for tokens of no sequence
    and of sequences without a slot."""
    seq, place, length = token_owners(request, inputs.cu_seqlens)
    last = place == length - 1
    if request.inplace_state:
        table = state_pool.rows_written(request, inputs, read.no_slot)
        write = table[seq, place] if table.ndim == 2 else jnp.where(last, table[seq], -1)
    else:
        write = jnp.where(last & request.output_final_state, seq, -1)
    first = place == 0
    if request.packed:
        first, write = first & (place < length), jnp.where(place < length, write, -1)
    if read.no_slot is not None:
        write = jnp.where(read.no_slot[seq], -1, write)
    return make_recurrent_plan(first, read.rows[seq], write)


def forward(request: Request, inputs: RecurrentInputs, launch: Launch) -> Outputs:
    """Outputs token by token; ``final_state`` is the updated pool with ``inplace_state``."""
    options = kernel_options(request)
    if request.inplace_state:
        rows = state_pool.written_pool(inputs).shape[0]
    else:
        rows = request.N if request.output_final_state else 0
    read = state_pool.rows_read(request, inputs)
    plan = plan_recurrent(request, inputs, read)
    moved = _moved_by_empty_sequences(request, inputs, read)
    o, states = recurrent_kernel(request, inputs, options, plan, rows, launch)
    o = _without_padding(request, inputs, read.no_slot, o)
    if states is not None and not request.inplace_state:
        states = _with_unwritten(request, inputs, read, states)
    if moved is not None:
        states = state_pool.states_written(required(states), *moved)
    return Outputs(o, states)


def _moved_by_empty_sequences(
    request: Request, inputs: RecurrentInputs, read: RowsRead
) -> tuple[Array, Array] | None:
    """Rows ``[N]`` of the written pool, -1 for none, and states for them: where sequences without tokens, at which
    the kernel could write, have to write what they start from. None if they write where they read, if at all."""
    elsewhere = (inputs.write_indices, inputs.write_pool, inputs.has_initial_state)
    if not (request.inplace_state and request.packed) or all(x is None for x in elsewhere):
        return None
    rows = state_pool.rows_written(request, inputs, read.no_slot)
    if rows.ndim == 2:  # states after tokens, of which there are none
        return None
    cu = required(inputs.cu_seqlens)
    empty = cu[1:] == cu[:-1]
    pool = state_pool.written_pool(inputs) if inputs.initial_state is None else inputs.initial_state
    starts = state_pool.states_read(pool, jnp.where(empty, read.rows, -1))
    return jnp.where(empty, rows, -1), starts


def _without_padding(request: Request, inputs: RecurrentInputs, no_slot: Array | None, o: Array) -> Array:
    """``o`` with zeros for tokens of no sequence and of sequences without a slot."""
    if not request.packed and no_slot is None:
        return o
    seq, place, length = token_owners(request, inputs.cu_seqlens)
    padding = place >= length
    if no_slot is not None:
        padding = padding | no_slot[seq]
    return jnp.where(padding.reshape(request.B, request.T, 1, 1), jnp.zeros((), o.dtype), o)


def _with_unwritten(request: Request, inputs: RecurrentInputs, read: RowsRead, states: Array) -> Array:
    """Sequences that are empty or have no slot write no state: theirs is the state they start from."""
    if not request.packed and read.no_slot is None:
        return states
    unwritten = jnp.zeros(request.N, bool) if read.no_slot is None else read.no_slot
    if request.packed:
        cu = required(inputs.cu_seqlens)
        unwritten = unwritten | (cu[1:] == cu[:-1])
    start = jnp.zeros_like(states)
    if inputs.initial_state is not None:
        start = state_pool.states_read(inputs.initial_state, read.rows).astype(states.dtype)
    return jnp.where(unwritten[:, None, None, None], start, states)
