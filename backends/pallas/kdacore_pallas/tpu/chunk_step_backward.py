"""Gradients of one chunk of one value head, in registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kdacore_pallas.tpu import tiles
from kdacore_pallas.tpu.chunk_step import Keys, WithinChunk, keys, written
from kdacore_pallas.tpu.intra_backward import TreeGrads, tree_backward
from kdacore_pallas.tpu.options import KernelOptions
from kdacore_pallas.tpu.products import NN, NT, TN, product

Array = Any


class ChunkGrads(NamedTuple):
    q: Array
    k: Array
    v: Array
    g: Array
    """Gradient of the log decay, ``[C, K]``."""
    beta: Array
    """``[C, 1]``."""
    state: Array
    """``[V, K]``, of the state the chunk starts from."""


def lower(C: int, strict: bool) -> Array:
    """``[C, C]`` bool."""
    i, j = tiles.row_index(C, C), jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    return i > j if strict else i >= j


class FromState(NamedTuple):
    """Gradients as far as the recurrence over chunks needs them."""

    written: Array
    """``[C, V]``, of what is written at each token, before the inverse: of ``beta error``."""
    error: Array
    """``[C, V]``, of the values minus what their keys read."""
    state: Array
    """``[V, K]``, of the state the chunk starts from."""


def state_backward(options: KernelOptions, x: WithinChunk, s: Keys, do: Array, dend: Array) -> FromState:
    """``do`` ``[C, V]`` is the gradient of the output, ``dend`` ``[V, K]`` that of the state after the chunk."""
    dv_new = product(x.qk, do, TN, options.values) + product(s.kg, dend, NT, options.state)
    dwritten = product(s.inverse, dv_new, TN, options.values)
    derror = x.rows.beta * dwritten
    rows, columns = jnp.concatenate([do, -derror], axis=0), jnp.concatenate([s.qg, s.kp], axis=0)
    return FromState(dwritten, derror, dend * x.tree.total[:1] + product(rows, columns, TN, options.state))


class BeforeTree(NamedTuple):
    """Gradients that are complete, and what the backward of the tree starts from."""

    v: Array
    beta: Array
    state: Array
    qk: Array
    kk: Array
    tree: TreeGrads


def step_backward(options: KernelOptions, x: WithinChunk, state: Array, do: Array, dend: Array) -> BeforeTree:
    """Gradients of a chunk up to those of its interactions and decays. ``state`` is what the chunk starts from,
    ``dend`` the gradient of what it ends with, both ``[V, K]``."""
    C, (rows, tree) = do.shape[0], x[:2]
    s = keys(options, x)
    error, v_new = written(options, x, s, state)
    d = state_backward(options, x, s, do, dend)
    # written = inverse (beta error), inverse = (I + diag(beta) kk)^-1, error = v - kp state
    both = jnp.concatenate([do, d.error], axis=0)
    read = product(both, state, NN, options.state)
    dqg, dkp = read[:C], -read[C:]
    both = jnp.concatenate([do, -d.written], axis=0)
    pairs = product(both, v_new, NT, options.values)
    dqk = jnp.where(lower(C, False), pairs[:C], 0.0)
    dL = jnp.where(lower(C, True), pairs[C:], 0.0)
    dkg = product(v_new, dend, NN, options.state)
    dtotal = jnp.sum(state * dend, axis=0, keepdims=True) * tree.total[:1]
    dbeta = jnp.sum(dL * x.kk, axis=1, keepdims=True) + jnp.sum(d.written * error, axis=1, keepdims=True)
    start = TreeGrads(
        q=dqg * tree.prefix,
        k=dkp * tree.prefix + dkg * tree.suffix,
        inclusive=s.qg * dqg + s.kp * dkp,
        exclusive=s.kg * dkg,
        final=jnp.broadcast_to(dtotal, rows.k.shape),
    )
    return BeforeTree(d.error, dbeta, d.state, dqk, rows.beta * dL, start)


def pairs_backward(options: KernelOptions, x: WithinChunk, d: BeforeTree) -> ChunkGrads:
    """The rest of the gradients."""
    dq, dk, dg = tree_backward(x.rows.q, x.rows.k, x.tree, d.qk, d.kk, d.tree, options.pairs)
    return ChunkGrads(dq, dk, d.v, dg, d.beta, d.state)
