"""One segment of chunks: rows made ready for the recurrence, and the products that need no state.

Arrays are ``[M, R, C, D]``: chunks, batch and q/k heads in one axis; value heads per q/k head (1 for q and k, which
are never repeated); rows; channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.types import ChunkInputs, Request
from kdacore_pallas.xla import gate
from kdacore_pallas.xla.intra import Decays, Interactions, decays, interactions
from kdacore_pallas.xla.layout import Plan
from kdacore_pallas.xla.numerics import F32, dot, given

Array = Any


class Raw(NamedTuple):
    """A segment of the caller's values in float32, not yet normalised or gated."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    mask: Array | None
    q_unit: Array | None = None
    """``[M, 1, C, 1]`` what normalises each row of q; None when it stays as it is."""
    k_unit: Array | None = None


class Params(NamedTuple):
    """Gate parameters shaped to broadcast against a segment's ``g``."""

    A_log: Array | None
    dt_bias: Array | None


def gate_params(inputs: ChunkInputs, plan: Plan) -> Params:
    def spread(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = x.astype(F32).reshape(plan.H, plan.R, 1, -1)
        whole = jnp.broadcast_to(x, (plan.G * plan.B, *x.shape))
        return whole.reshape(plan.M, *x.shape[1:])

    return Params(spread(inputs.A_log), spread(inputs.dt_bias))


def load(request: Request, inputs: ChunkInputs, plan: Plan, s: Array) -> Raw:
    """Segment ``s`` of padded inputs (``g`` already with a channel axis)."""
    q, k, v, g, beta = (plan.load(x, s).astype(F32) for x in inputs[:5])
    raw = Raw(q, k, v, g, beta[..., None], plan.mask(s))
    if not request.qk_l2norm:
        return raw
    q_unit, k_unit = (plan.load(x, s, gate.unit) for x in (inputs.q, inputs.k))
    return raw._replace(q_unit=q_unit, k_unit=k_unit)


class Rows(NamedTuple):
    """What the recurrence reads. Rows that are no token have k, v, beta and the log decay zero."""

    q: Array
    """Normalised if asked, times ``scale``."""
    k: Array
    v: Array
    g: Array
    """Natural-log decay."""
    beta: Array


def ready(request: Request, raw: Raw, params: Params, again: bool = False) -> Rows:
    """``again``: in the backward, which of a dense call masks the decays alone.

    Its rows that are no token are zeros, so the mask of all else changes nothing; the forward is faster with it, on a
    CPU, and the backward without.
    """
    q, k, v = raw.q, raw.k, raw.v
    if request.qk_l2norm:
        q, k = q * given(raw.q_unit), k * given(raw.k_unit)
    g = gate.log_decay(request, raw.g, params.A_log, params.dt_bias)
    beta = gate.strength(request, raw.beta)
    if raw.mask is not None:
        g = jnp.where(raw.mask, g, 0.0)
        if request.packed or not again:
            q, k, v, beta = (jnp.where(raw.mask, x, 0.0) for x in (q, k, v, beta))
    return Rows(q * request.scale, k, v, g, beta)


class Prepared(NamedTuple):
    """State-free products of a segment."""

    decay: Decays
    pair: Interactions
    w: Array
    """Rows that read the state to form the correction: ``inverse (beta k prefix)``."""
    u: Array
    """``inverse (beta v)``."""
    qg: Array
    """``q prefix``."""
    kg: Array
    """``k suffix``."""


def prepare(rows: Rows, precision: lax.Precision, kept: Interactions | None = None) -> Prepared:
    """``kept``: the interactions, where an earlier pass over the same rows still has them."""
    decay = decays(rows.g)
    pair = interactions(rows.q, rows.k, rows.beta, decay, precision) if kept is None else kept
    w = dot("...ij,...jk->...ik", pair.inverse, rows.beta * rows.k * decay.prefix, precision)
    u = dot("...ij,...jv->...iv", pair.inverse, rows.beta * rows.v, precision)
    return Prepared(decay, pair, w, u, rows.q * decay.prefix, rows.k * decay.suffix)
