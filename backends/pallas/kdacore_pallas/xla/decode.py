"""The step that servers decode with: convolution, recurrence and gated norm in one program, float32 between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kdacore.contract.state_rows import StateRows
from kdacore.types import CommitInputs, CommitOutputs, DecodeInputs, Outputs, RecurrentInputs, Request
from kdacore_pallas.xla import records, recurrent, state_pool
from kdacore_pallas.xla.convolution import Convolution, committed
from kdacore_pallas.xla.numerics import F32, mesh_axes, total
from kdacore_pallas.xla.sequences import Sequences, sequences_of
from kdacore_pallas.xla.state_rows import state_rows

Array = Any


def forward_rows(request: Request, inputs: DecodeInputs, rows: StateRows) -> Outputs:
    """``fused_decode_kda`` and ``fused_decode_gated_delta_rule``.

    Args:
        request: of the call.
        inputs: its arrays.
        rows: of its pools and records.

    Returns: ``o``; ``final_state``, with ``inplace_state`` the updated pool; in ``written`` the other arrays that the
        call writes.
    """
    sequences = sequences_of(request, inputs.cu_seqlens, rows.padding)
    conv = None if inputs.conv_weight is None else Convolution(request, inputs, sequences, rows)
    x = inputs.x if conv is None else conv.output()
    done = recurrent.run(request, _recurrent_inputs(request, inputs, x), rows)
    o = _normed(request, inputs, done.o, sequences).astype(inputs.x.dtype)
    written = done.records
    if conv is not None and request.inplace_state:
        written = (*conv.written(), *written)
    return Outputs(o, done.final_state, written=written)


def forward(request: Request, inputs: DecodeInputs) -> Outputs:
    """:func:`forward_rows`, the rows read on the device."""
    return forward_rows(request, inputs, state_rows(request, inputs))


def _recurrent_inputs(request: Request, inputs: DecodeInputs, x: Array) -> RecurrentInputs:
    """The arrays of the recurrent op: q, k and v from the channels ``[B, T, D]``, all else as it was given."""
    keys = request.H * request.K

    def heads(first: int, end: int, count: int) -> Array:
        return x[:, :, first:end].reshape(request.B, request.T, count, -1)

    shared: dict[str, Any] = {n: getattr(inputs, n) for n in RecurrentInputs._fields if n in inputs._fields}
    return RecurrentInputs(
        q=heads(0, keys, request.H),
        k=heads(keys, 2 * keys, request.H),
        v=heads(2 * keys, x.shape[2], request.HV),
        **shared,
    )


def _normed(request: Request, inputs: DecodeInputs, o: Array, sequences: Sequences) -> Array:
    """The gated norm of ``o`` ``[B, T, HV, V]``; rows of no sequence are zero, whatever z holds there."""
    if inputs.norm_weight is None:
        return o
    o = o * jax.lax.rsqrt(total(o * o, -1) / request.V + request.norm_eps)
    o = o * inputs.norm_weight.astype(F32)
    if inputs.z is None:
        return o
    z = inputs.z.astype(F32)
    gate = jax.nn.sigmoid(z)
    gate = gate if request.norm_activation == "sigmoid" else z * gate
    read = sequences.of_tokens(request.B * request.T)[2].reshape(request.B, request.T, 1, 1)
    return jnp.where(read, o * gate, 0.0)


def commit_rows(request: Request, inputs: CommitInputs, rows: StateRows) -> CommitOutputs:
    """``commit_records``: the pool after the records, and the convolution states where there are any."""
    pool, axes = inputs.initial_state, mesh_axes(*inputs)
    start = recurrent.from_pool(request, state_pool.states_read(pool, rows.read))
    states = records.replayed(request, inputs, rows, start, pool.dtype, axes)
    states = recurrent.to_pool(request, states, pool.dtype)
    state = None if inputs.conv_state is None else committed(inputs, rows)
    return CommitOutputs(state_pool.store(pool, rows.final, states), state)


def commit(request: Request, inputs: CommitInputs) -> CommitOutputs:
    """:func:`commit_rows`, the rows read on the device."""
    return commit_rows(request, inputs, state_rows(request, inputs))
