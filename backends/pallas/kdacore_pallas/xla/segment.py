"""One segment of chunks: the recurrence's inputs, the products that need no state; and the scan
over segments.

Arrays are ``[M, R, C, D]``: chunks, batch and q/k heads in one axis; value heads per q/k head (1
for q and k, which are never repeated); rows; channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs, Request
from kdacore_pallas.xla import gate, intra, intra_tpu
from kdacore_pallas.xla.intra import Interactions
from kdacore_pallas.xla.numerics import F32, dot, required, varying
from kdacore_pallas.xla.plan import ChunkPlan

Array = Any


class Raw(NamedTuple):
    """A segment of the caller's values in float32, not yet normalised or gated."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    mask: Array | None
    q_inverse_norm: Array | None = None
    """``[M, 1, C, 1]`` inverse norm of each row of q; None without l2norm."""
    k_inverse_norm: Array | None = None


class Params(NamedTuple):
    """Gate parameters shaped to broadcast against a segment's ``g``."""

    A_log: Array | None
    dt_bias: Array | None


def within_chunks(request: Request) -> Any:
    """The module that computes decays, interactions and their gradients on the call's device."""
    return intra_tpu if request.device.type == "tpu" else intra


def gate_params(inputs: ChunkInputs, plan: ChunkPlan) -> Params:
    def spread(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = x.astype(F32).reshape(plan.H, plan.R, 1, -1)
        whole = jnp.broadcast_to(x, (plan.G * plan.B, *x.shape))
        return whole.reshape(plan.M, *x.shape[1:])

    return Params(spread(inputs.A_log), spread(inputs.dt_bias))


def load(request: Request, inputs: ChunkInputs, plan: ChunkPlan, s: Array) -> Raw:
    """Segment ``s`` of padded inputs (``g`` already with a channel axis)."""
    q, k, v, g, beta = (plan.load(x, s).astype(F32) for x in inputs[:5])
    raw = Raw(q, k, v, g, beta[..., None], plan.mask(s))
    if not request.qk_l2norm:
        return raw
    if request.device.type == "tpu":  # there an array of one channel costs as much to arrange as one of 128
        return raw._replace(q_inverse_norm=gate.inverse_norm(q), k_inverse_norm=gate.inverse_norm(k))
    q_inverse, k_inverse = (plan.load(x, s, gate.inverse_norm) for x in (inputs.q, inputs.k))
    return raw._replace(q_inverse_norm=q_inverse, k_inverse_norm=k_inverse)


class Rows(NamedTuple):
    """Inputs of the recurrence. In rows that are not tokens k, v, beta and the log decay are zero."""

    q: Array
    """Normalised if asked, times ``scale``."""
    k: Array
    v: Array
    g: Array
    """Natural-log decay."""
    beta: Array


def recurrence_rows(request: Request, raw: Raw, params: Params, in_backward: bool = False) -> Rows:
    """Normalise, gate and mask a segment. ``in_backward``: of a dense call, mask the decays alone.

    Padding rows of a dense call are zeros, so masking the other arrays changes no value. On a CPU
    it makes the forward faster and the backward slower.
    """
    q, k, v = raw.q, raw.k, raw.v
    if request.qk_l2norm:
        q, k = q * required(raw.q_inverse_norm), k * required(raw.k_inverse_norm)
    g = gate.log_decay(request, raw.g, params.A_log, params.dt_bias)
    beta = gate.beta_forward(request, raw.beta)
    if raw.mask is not None:
        g = jnp.where(raw.mask, g, 0.0)
        if request.packed or not in_backward:
            q, k, v, beta = (jnp.where(raw.mask, x, 0.0) for x in (q, k, v, beta))
    return Rows(q * request.scale, k, v, g, beta)


class Prepared(NamedTuple):
    """State-free products of a segment."""

    decay: Any
    """Decay factors of :func:`within_chunks`."""
    pair: Interactions
    w: Array
    """Rows that read the state to form the correction: ``inverse (beta k prefix)``."""
    u: Array
    """``inverse (beta v)``."""
    qg: Array
    """``q prefix``."""
    kg: Array
    """``k suffix``."""


def prepare(
    request: Request, rows: Rows, precision: lax.Precision, saved: Interactions | None = None
) -> Prepared:
    """Products of a segment. ``saved``: the interactions, if the forward saved them."""
    within = within_chunks(request)
    decay = within.decays(rows.g)
    pair = within.interactions(rows.q, rows.k, rows.beta, decay, precision) if saved is None else saved
    w = dot("...ij,...jk->...ik", pair.inverse, rows.beta * rows.k * decay.prefix, precision)
    u = dot("...ij,...jv->...iv", pair.inverse, rows.beta * rows.v, precision)
    return Prepared(decay, pair, w, u, rows.q * decay.prefix, rows.k * decay.suffix)


def next_state(state: Array, v_new: Array, kg: Array, total: Array, precision: lax.Precision) -> Array:
    """The state after a chunk: decayed, plus its corrections."""
    return state * jnp.swapaxes(total, -1, -2) + dot("...ck,...cv->...kv", kg, v_new, precision)


def scan_segments(
    request: Request,
    plan: ChunkPlan,
    body: Callable[[Any, Array], tuple[Any, Any]],
    carry: Any,
    axes: frozenset[str],
) -> tuple[Any, Any]:
    """``lax.scan`` of ``body`` over the numbers of the segments that may hold a token.

    ``axes``: the mesh axes that the results vary over.

    On a CPU the number of segments is hidden from XLA: with a known number, a forward that masks
    its rows takes 1.4 times as long.
    """
    if request.device.type != "cpu":
        scanned: tuple[Any, Any] = lax.scan(body, carry, jnp.arange(plan.used_segments, dtype=jnp.int32))
        return scanned
    one = jax.eval_shape(body, carry, jnp.int32(0))[1]
    stacked = jax.tree.map(lambda y: varying(jnp.zeros((plan.segments, *y.shape), y.dtype), axes), one)

    def step(s: Array, so_far: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, ys = so_far
        carry, y = body(carry, s)
        return carry, jax.tree.map(
            lambda stack, own: lax.dynamic_update_index_in_dim(stack, own, s, 0), ys, y
        )

    count = lax.optimization_barrier(jnp.int32(plan.used_segments))
    done: tuple[Any, Any] = lax.fori_loop(0, count, step, (carry, stacked))
    return done
