"""The chunked ops forward for GPUs: 16-bit inputs, no gradients.

What a GPU pays for here is bytes, so what fits is kept in 16 bits and as little as possible is written. With
``[Q; K'] = [qk; k_end^T] inverse`` a chunk is ``end = total start + K' v - (K' k) start`` and
``o = (q - Q k) start + Q v``, where q and k are decayed from the chunk's start and k_end to its end. Everything but
v and the states is then a product of contractions, at most 2 for normalised q and k: float16 holds it. Without
normalisation all of it is float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_pallas.xla import chunk, gate, segment
from kdacore_pallas.xla.layout import Plan, make_plan
from kdacore_pallas.xla.numerics import F32, dot, mesh_axes, product_precision, total, varying
from kdacore_pallas.xla.pairs import F16, decay_sums, operands, pairs

Array = Any
CHUNK = 128
SEGMENT = 16
"""Chunks of a segment at most: their states follow one another in the program itself, not in a loop."""
BF16 = jnp.bfloat16


def serves(request: Request) -> bool:
    """Is this call one for :func:`forward`? All others are :func:`.chunk.forward`'s."""
    return (
        request.device.type == "cuda"
        and not request.needs_grad
        and request.dtype in ("bfloat16", "float16")
        and request.checkpoint_every % CHUNK == 0
    )


Carry = tuple[Array, chunk.Buffers, Array]
"""The running state, rows written in passing, and the states the chunks of a segment start from."""


class Prepared(NamedTuple):
    """A segment's products that need no state, ``[M, R, ...]``."""

    P: Array
    """``q - Q k`` ``[C, K]``."""
    Qv: Array
    """``[C, V]``."""
    Kk: Array
    """``K' k`` ``[K, K]``."""
    Kv: Array
    """``[K, V]`` float32."""
    total: Array
    """``[1, K]`` decay of the whole chunk."""


def _log_decays(request: Request, g: Array, params: segment.Params, mask: Array | None) -> Array:
    """Each row's log decay two times, ``[M, R, C, 2, K]``, zero where there is no token."""

    def twice(x: Array | None) -> Array | None:
        return None if x is None else x[..., None, :]

    g = jnp.broadcast_to(g[..., None, :], (*g.shape[:-1], 2, g.shape[-1])).astype(F32)
    log = gate.log_decay(request, g, twice(params.A_log), twice(params.dt_bias))
    return log if mask is None else jnp.where(mask[..., None], log, 0.0)


def _prepare(request: Request, inputs: ChunkInputs, plan: Plan, params: segment.Params, s: Array) -> Prepared:
    half = F16 if request.qk_l2norm else F32
    precision = product_precision(request)
    mask = plan.mask(s)

    def tokens(x: Array) -> Array:
        return x if mask is None else jnp.where(mask, x, jnp.zeros((), x.dtype))

    q_rows, k_rows = (plan.rows(x, s).astype(F32) for x in (inputs.q, inputs.k))
    numbers = (gate.unit(q_rows), gate.unit(k_rows), total(q_rows * k_rows, -1))
    # Read off the rows before they are turned, or XLA would sum along the turned ones.
    q_unit, k_unit, own = (plan.arranged(x) for x in lax.optimization_barrier(numbers))
    q, k = plan.arranged(q_rows), plan.arranged(k_rows)
    if request.qk_l2norm:
        q, k, own = q * q_unit, k * k_unit, own * q_unit * k_unit
    k = tokens(k)
    v = tokens(plan.load(inputs.v, s))
    beta = tokens(gate.strength(request, plan.load(inputs.beta, s).astype(F32))[..., None])
    c = decay_sums(_log_decays(request, plan.load(inputs.g, s), params, mask))
    made = operands(q, k, c, half)
    pair = pairs(q, k, own, c, beta, made, half, precision)
    Q = dot("...ij,...jc->...ic", pair.qk, pair.inverse, precision).astype(half)
    K = dot("...ik,...ij->...kj", made.end_k, pair.inverse, precision).astype(half)
    Qk = dot("...ij,...jk->...ik", Q, made.start_k, precision).astype(half)
    Kk = dot("...ij,...jk->...ik", K, made.start_k, precision).astype(half)
    P = made.start_q - Qk
    Qv = dot("...ij,...jv->...iv", Q.astype(F32), v.astype(F32), precision)
    Kv = dot("...ij,...jv->...iv", K.astype(F32), v.astype(F32), precision)
    return Prepared(P, Qv.astype(BF16), Kk, Kv, jnp.exp(c[:, :, -1:]))


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """Outputs of the chunked op for a request that :func:`serves`."""
    axes = mesh_axes(*inputs)
    plan = make_plan(request, inputs.cu_seqlens, CHUNK, most=SEGMENT)
    precision = product_precision(request)
    params = segment.gate_params(inputs, plan)
    arrays = chunk.padded(request, chunk.with_channels(request, inputs), plan)
    initial = chunk.states_in(request, plan, inputs.initial_state, axes)

    def body(carry: Carry, s: Array) -> tuple[Carry, Array]:
        state, buffers, starts = carry
        prep = _prepare(request, arrays, plan, params, s)
        flag = chunk.flags(request, plan, s, inputs.cu_seqlens)
        Kk, Kv, total = (plan.per_chunk(x) for x in (prep.Kk, prep.Kv, prep.total))
        # Products cannot read a part of an array: all parts in one pass.
        Kk = lax.optimization_barrier([Kk[n] for n in range(plan.G)])
        for n in range(plan.G):
            at = chunk.Flags(*(None if x is None else x[n] for x in flag))
            start = chunk.enter(state, at, initial)
            change = Kv[n] - dot("...ij,...jv->...iv", Kk[n].astype(F32), start, precision)
            state = start * jnp.swapaxes(total[n], -1, -2) + change
            buffers = chunk.record(buffers, at, start, state)
            starts = lax.dynamic_update_index_in_dim(starts, start.astype(BF16), n, 0)
        start = starts.reshape(plan.M, *state.shape[1:]).astype(F32)
        o = dot("...ik,...kv->...iv", prep.P.astype(F32), start, precision) + prep.Qv
        return (state, buffers, starts), plan.in_order((o * request.scale).astype(inputs.v.dtype))

    state = chunk.start_state(plan, initial)
    starts = varying(jnp.zeros((plan.G, *state.shape), BF16), axes)
    carry = (state, chunk.state_buffers(request, plan, initial), starts)
    (state, buffers, _), o = lax.scan(body, carry, jnp.arange(plan.segments, dtype=jnp.int32))
    return chunk.outputs(request, plan, o, state, buffers)
