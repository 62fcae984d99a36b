"""``fused_recurrent_kda`` and its GDN form by the recurrent kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kdacore.types import Outputs, RecurrentInputs, Request
from kdacore_pallas.tpu.launch import Launch
from kdacore_pallas.tpu.options import kernel_options
from kdacore_pallas.tpu.recurrent_kernel import RecurrentPlan, make_recurrent_plan, recurrent_kernel
from kdacore_pallas.xla.numerics import required
from kdacore_pallas.xla.recurrent import read_rows, write_rows

Array = Any


def token_owners(request: Request, cu_seqlens: Array | None) -> tuple[Array, Array, Array]:
    """Per token, int32 ``[B * T]``: its sequence, its place in it, and the length of that sequence."""
    token = jnp.arange(request.B * request.T, dtype=jnp.int32)
    if cu_seqlens is None:
        return token // request.T, token % request.T, jnp.full_like(token, request.T)
    cu = cu_seqlens.astype(jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(cu[1:], token, side="right"), request.N - 1).astype(jnp.int32)
    return seq, token - cu[seq], (cu[1:] - cu[:-1])[seq]


def plan_recurrent(request: Request, inputs: RecurrentInputs) -> RecurrentPlan:
    """The rows that each token's state is read from and written to."""
    seq, place, length = token_owners(request, inputs.cu_seqlens)
    rows = -1 if inputs.initial_state is None else read_rows(request, inputs)[seq]
    last = place == length - 1
    if request.inplace_state:
        table = write_rows(request, inputs)
        write = table[seq, place] if table.ndim == 2 else jnp.where(last, table[seq], -1)
    else:
        write = jnp.where(last & request.output_final_state, seq, -1)
    return make_recurrent_plan(place == 0, jnp.broadcast_to(rows, seq.shape), write)


def forward(request: Request, inputs: RecurrentInputs, launch: Launch) -> Outputs:
    """Outputs token by token; ``final_state`` is the updated pool with ``inplace_state``."""
    options = kernel_options(request)
    if request.inplace_state:
        rows = required(inputs.initial_state).shape[0]
    else:
        rows = request.N if request.output_final_state else 0
    o, states = recurrent_kernel(request, inputs, options, plan_recurrent(request, inputs), rows, launch)
    if states is not None and request.packed and not request.inplace_state:
        states = _with_empty(request, inputs, states)
    return Outputs(o, states)


def _with_empty(request: Request, inputs: RecurrentInputs, states: Array) -> Array:
    """Empty sequences have no token: their final state is their start state."""
    cu = required(inputs.cu_seqlens)
    lengths = cu[1:] - cu[:-1]
    start = jnp.zeros_like(states)
    if inputs.initial_state is not None:
        rows = read_rows(request, inputs)
        rows = jnp.where(rows < 0, inputs.initial_state.shape[0], rows)
        start = jnp.take(inputs.initial_state, rows, axis=0, mode="fill", fill_value=0)
    return jnp.where((lengths == 0)[:, None, None, None], start.astype(states.dtype), states)
