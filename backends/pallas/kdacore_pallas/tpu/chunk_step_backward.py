"""Gradients of one chunk of one value head, in registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kdacore_pallas.tpu import tiles
from kdacore_pallas.tpu.chunk_step import Prepared, Rows
from kdacore_pallas.tpu.intra_backward import TreeGrads, tree_backward
from kdacore_pallas.tpu.options import KernelOptions
from kdacore_pallas.tpu.products import NN, NT, TN, product

Array = Any


class ChunkGrads(NamedTuple):
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
    i, j = tiles.row_index(C, C), jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    return i > j if strict else i >= j


def state_backward(options: KernelOptions, x: Prepared, do: Array, dend: Array) -> tuple[Array, Array]:
    """Gradients ``[C, V]`` of the corrected values and ``[V, K]`` of the chunk's start state."""
    dv = product(x.qk, do, TN, options.values) + product(x.kg, dend, NT, options.state)
    dstate = (
        dend * x.tree.total[:1] + product(do, x.qg, TN, options.state) - product(dv, x.w, TN, options.state)
    )
    return dv, dstate


def chunk_step_backward(
    options: KernelOptions, rows: Rows, x: Prepared, v_new: Array, state: Array, do: Array, dend: Array
) -> ChunkGrads:
    """``state`` is the chunk's start state, ``dend`` the gradient of its end state, both
    ``[V, K]``."""
    C = do.shape[0]
    dv, dstate = state_backward(options, x, do, dend)
    dqg = product(do, state, NN, options.state)
    dw = -product(dv, state, NN, options.state)
    dkg = product(v_new, dend, NN, options.state)
    dtotal = jnp.sum(state * dend, axis=0, keepdims=True) * x.tree.total[:1]

    # w = inverse (beta kp), u = inverse (beta v), inverse = (I + diag(beta) kk)^-1
    dright_w = product(x.inverse, dw, TN, options.values)
    dright_u = product(x.inverse, dv, TN, options.values)
    dL = product(dright_w, x.w, NT, options.values) + product(dright_u, x.u, NT, options.values)
    dL = jnp.where(lower(C, True), -dL, 0.0)
    dqk = jnp.where(lower(C, False), product(do, v_new, NT, options.values), 0.0)
    dbeta = jnp.sum(dL * x.kk, axis=1, keepdims=True)
    dbeta += jnp.sum(dright_u * rows.v, axis=1, keepdims=True)
    dbeta += jnp.sum(dright_w * x.kp, axis=1, keepdims=True)

    dkp = rows.beta * dright_w
    start = TreeGrads(
        q=dqg * x.tree.prefix,
        k=dkp * x.tree.prefix + dkg * x.tree.suffix,
        inclusive=x.qg * dqg + x.kp * dkp,
        exclusive=x.kg * dkg,
        final=jnp.broadcast_to(dtotal, rows.k.shape),
    )
    dq, dk, dg = tree_backward(rows.q, rows.k, x.tree, dqk, rows.beta * dL, start, options.pairs)
    return ChunkGrads(dq, dk, rows.beta * dright_u, dg, dbeta, dstate)
