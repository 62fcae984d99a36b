"""The chunked ops forward for GPUs: 16-bit inputs, no gradients.

Memory traffic limits a GPU here, so intermediates are 16-bit where that is accurate enough, and few
are written. With ``[Q; K'] = [qk; k_end^T] inverse`` a chunk is
``end = total start + K' v - (K' k) start`` and ``o = (q - Q k) start + Q v``, where q and k are
decayed from the chunk's start and k_end to its end. Everything but v and the states is then a
product of contractions, at most 2 for normalised q and k: float16 holds it. Without normalisation
all of it is float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs, Outputs, Request
from kdacore_pallas.xla import checkpoint_offsets, chunk_forward, gate, segment, state_pool
from kdacore_pallas.xla.intra_gpu import F16, decay_sums, interactions, operands
from kdacore_pallas.xla.numerics import F32, dot, mesh_axes, product_precision, required, total, varying
from kdacore_pallas.xla.plan import ChunkPlan, make_plan

Array = Any
CHUNK = 128
SEGMENT = 16
"""Chunks of a segment at most: their states follow one another in the program itself, not in a
loop."""
BF16 = jnp.bfloat16


def serves(request: Request) -> bool:
    """Whether :func:`forward` serves the call. All others go to :func:`.chunk_forward.forward`."""
    return (
        request.device.type == "cuda"
        and not request.needs_grad
        and request.dtype in ("bfloat16", "float16")
        and request.checkpoint_every % CHUNK == 0
    )


Carry = tuple[Array, chunk_forward.Buffers, Array]
"""The running state, the written states, and the states that the chunks of a segment start from."""


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
    """Each row's log decay, two copies, ``[M, R, C, 2, K]``; zero where there is no token."""

    def twice(x: Array | None) -> Array | None:
        return None if x is None else x[..., None, :]

    g = jnp.broadcast_to(g[..., None, :], (*g.shape[:-1], 2, g.shape[-1])).astype(F32)
    log = gate.log_decay(request, g, twice(params.A_log), twice(params.dt_bias))
    return log if mask is None else jnp.where(mask[..., None], log, 0.0)


def _prepare(
    request: Request, inputs: ChunkInputs, plan: ChunkPlan, params: segment.Params, s: Array
) -> Prepared:
    half = F16 if request.qk_l2norm else F32
    precision = product_precision(request)
    mask = plan.mask(s)

    def tokens(x: Array) -> Array:
        return x if mask is None else jnp.where(mask, x, jnp.zeros((), x.dtype))

    q_rows, k_rows = (plan.rows(x, s).astype(F32) for x in (inputs.q, inputs.k))
    numbers = (gate.inverse_norm(q_rows), gate.inverse_norm(k_rows), total(q_rows * k_rows, -1))
    # Computed before the rows are transposed: otherwise XLA would sum along the transposed ones.
    q_inverse, k_inverse, own = (plan.arranged(x) for x in lax.optimization_barrier(numbers))
    q, k = plan.arranged(q_rows), plan.arranged(k_rows)
    if request.qk_l2norm:
        q, k, own = q * q_inverse, k * k_inverse, own * q_inverse * k_inverse
    if plan.no_slot is not None:  # elsewhere rows that are no tokens are zeros
        q, own = tokens(q), tokens(own)
    k = tokens(k)
    v = tokens(plan.load(inputs.v, s))
    beta = tokens(gate.beta_forward(request, plan.load(inputs.beta, s).astype(F32))[..., None])
    c = decay_sums(_log_decays(request, plan.load(inputs.g, s), params, mask))
    made = operands(q, k, c, half)
    pair = interactions(q, k, own, c, beta, made, half, precision)
    Q = dot("...ij,...jc->...ic", pair.qk, pair.inverse, precision).astype(half)
    K = dot("...ik,...ij->...kj", made.end_k, pair.inverse, precision).astype(half)
    Qk = dot("...ij,...jk->...ik", Q, made.start_k, precision).astype(half)
    Kk = dot("...ij,...jk->...ik", K, made.start_k, precision).astype(half)
    P = made.start_q - Qk
    Qv = dot("...ij,...jv->...iv", Q.astype(F32), v.astype(F32), precision)
    Kv = dot("...ij,...jv->...iv", K.astype(F32), v.astype(F32), precision)
    return Prepared(P, Qv.astype(BF16), Kk, Kv, jnp.exp(c[:, :, -1:]))


def forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """Outputs of the chunked op for a request that :func:`serves` accepts, pool arguments resolved
    as for :func:`.chunk_forward.forward`."""
    axes = mesh_axes(*inputs)
    no_slot = state_pool.no_slot(inputs)
    plan = make_plan(request, inputs.cu_seqlens, CHUNK, max_chunks=SEGMENT, no_slot=no_slot)
    at = checkpoint_offsets.places(plan, inputs)
    precision = product_precision(request)
    params = segment.gate_params(inputs, plan)
    arrays = chunk_forward.padded(request, chunk_forward.with_channels(request, inputs), plan)
    initial = chunk_forward.states_in(request, plan, inputs.initial_state, axes)

    def body(carry: Carry, s: Array) -> tuple[Carry, Array]:
        state, buffers, starts = carry
        prep = _prepare(request, arrays, plan, params, s)
        flag = chunk_forward.flags(request, plan, s, inputs.cu_seqlens, at)
        Kk, Kv, total = (plan.per_chunk(x) for x in (prep.Kk, prep.Kv, prep.total))
        # A product cannot read a slice of an array: this copies all slices in one pass.
        Kk = lax.optimization_barrier([Kk[n] for n in range(plan.G)])
        for n in range(plan.G):
            own = chunk_forward.Flags(*(None if x is None else x[n] for x in flag))
            start = chunk_forward.chunk_start(state, own, initial)
            change = Kv[n] - dot("...ij,...jv->...iv", Kk[n].astype(F32), start, precision)
            state = start * jnp.swapaxes(total[n], -1, -2) + change
            buffers = chunk_forward.record_states(buffers, own, start, state)
            starts = lax.dynamic_update_index_in_dim(starts, start.astype(BF16), n, 0)
        start = starts.reshape(plan.M, *state.shape[1:]).astype(F32)
        o = dot("...ik,...kv->...iv", prep.P.astype(F32), start, precision) + prep.Qv
        return (state, buffers, starts), plan.in_order((o * request.scale).astype(inputs.v.dtype))

    state = chunk_forward.start_state(plan, initial)
    starts = varying(jnp.zeros((plan.G, *state.shape), BF16), axes)
    carry = (state, chunk_forward.state_buffers(request, plan, initial), starts)
    (state, buffers, _), o = lax.scan(body, carry, jnp.arange(plan.segments, dtype=jnp.int32))
    out = chunk_forward.outputs(request, plan, o, state, buffers)
    if at is None:
        return out
    starts = required(buffers.at_offsets)
    states = checkpoint_offsets.states(request, arrays, plan, at, starts, precision, axes)
    return chunk_forward.with_states_at_offsets(request, out, states)
