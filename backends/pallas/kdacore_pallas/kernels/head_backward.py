"""Backward of one value head of one chunk, in registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kdacore_pallas.kernels import head, tiles
from kdacore_pallas.kernels.head import Math, Prepared, Rows
from kdacore_pallas.kernels.levels_backward import Grads, tree_backward
from kdacore_pallas.kernels.products import NN, NT, TN, product

Array = Any


class HeadGrads(NamedTuple):
    q: Array
    k: Array
    v: Array
    g: Array
    """Of the log decay, ``[C, K]``."""
    beta: Array
    """``[C, 1]``."""
    state: Array
    """``[V, K]``, of the state the chunk starts from."""


def lower(C: int, strict: bool) -> Array:
    """``[C, C]`` bool."""
    i, j = head.row_index(C, C), jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    return i > j if strict else i >= j


def head_backward(
    math: Math, rows: Rows, x: Prepared, v_new: Array, state: Array, do: Array, dend: Array
) -> HeadGrads:
    """``state`` is the chunk's start state, ``dend`` the gradient of its end state, both ``[V, K]``."""
    C = do.shape[0]
    dv = product(x.qk, do, TN, math.values) + product(x.kg, dend, NT, math.state)
    dstate = dend * x.tree.total[:1] + product(do, x.qg, TN, math.state) - product(dv, x.w, TN, math.state)
    dqg = product(do, state, NN, math.state)
    dw = -product(dv, state, NN, math.state)
    dkg = product(v_new, dend, NN, math.state)
    dtotal = jnp.sum(state * dend, axis=0, keepdims=True) * x.tree.total[:1]

    # w = inverse (beta kp), u = inverse (beta v), inverse = (I + diag(beta) kk)^-1
    dright_w = product(x.inverse, dw, TN, math.values)
    dright_u = product(x.inverse, dv, TN, math.values)
    dL = product(dright_w, x.w, NT, math.values) + product(dright_u, x.u, NT, math.values)
    dL = jnp.where(lower(C, True), -dL, 0.0)
    dqk = jnp.where(lower(C, False), product(do, v_new, NT, math.values), 0.0)
    dbeta = jnp.sum(dL * x.kk, axis=1, keepdims=True)
    dbeta += jnp.sum(dright_u * rows.v, axis=1, keepdims=True)
    dbeta += jnp.sum(dright_w * x.kp, axis=1, keepdims=True)

    dkp = rows.beta * dright_w
    start = Grads(
        q=dqg * x.tree.prefix,
        k=dkp * x.tree.prefix + dkg * x.tree.suffix,
        inclusive=x.qg * dqg + x.kp * dkp,
        exclusive=x.kg * dkg,
        paid=jnp.broadcast_to(dtotal, rows.k.shape),
    )
    dq, dk, dg = tree_backward(rows.q, rows.k, x.tree, dqk, rows.beta * dL, start, math.pairs)
    return HeadGrads(dq, dk, rows.beta * dright_u, dg, dbeta, dstate)


def normalise_backward(x: Array, d: Array) -> Array:
    r = jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + head.NORM_EPS)
    y = x * r
    return r * (d - y * jnp.sum(d * y, axis=-1, keepdims=True))


def log_decay_backward(math: Math, x: Array, slope: Array | float, d: Array) -> tuple[Array, Array]:
    """Gradients of ``x`` and (per element) of ``A_log``; ``slope`` is ``exp(A_log)``."""
    if math.gate == "log":
        return d, jnp.zeros_like(d)
    if math.gate == "softplus":
        return -slope * d * jax.nn.sigmoid(x), -slope * d * head.softplus(x)
    assert math.lower_bound is not None
    y = jax.nn.sigmoid(slope * x)
    dx = d * (math.lower_bound * slope) * y * (1.0 - y)
    return dx, dx * x


def row(column: Array) -> Array:
    """``[C, 1]`` to ``[1, C]``."""
    C = column.shape[0]
    identity = tiles.unpack_diagonal(jnp.where(tiles.packed_identity(C), 1.0, 0.0))
    return jnp.sum(identity * column, axis=0, keepdims=True)
