"""One chunk of one value head, in registers: the products that need no state, the output and the
next state.

Used by the forward kernel and by the recomputation in the backward kernel. The state is kept
transposed, ``[V, K]``, so that its decay lies along lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from kdacore_pallas.tpu import inverse as inverses
from kdacore_pallas.tpu.intra import Tree, decay_tree, interactions
from kdacore_pallas.tpu.options import KernelOptions
from kdacore_pallas.tpu.products import NN, NT, TN, Passes, product

Array = Any
INVERSES: dict[str, Callable[[Array, Passes], Array]] = {
    "substitution": inverses.by_substitution,
    "merging": inverses.by_merging,
}


class Rows(NamedTuple):
    """One head's chunk, float32: ``q`` scaled, ``g`` the log decay, ``beta`` ``[C, 1]``."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


class WithinChunk(NamedTuple):
    """What comes of a chunk's rows alone."""

    rows: Rows
    tree: Tree
    qk: Array
    kk: Array


class Keys(NamedTuple):
    """What reads and writes the state, and the inverse between the two."""

    inverse: Array
    """``(I + diag(beta) kk)^-1``"""
    kp: Array
    """``k prefix`` ``[C, K]``: what the keys read the state with."""
    qg: Array
    """``q prefix`` ``[C, K]``"""
    kg: Array
    """``k suffix`` ``[C, K]``: what the keys write the state with."""


def within_chunk(options: KernelOptions, rows: Rows) -> WithinChunk:
    """Decays and interactions."""
    tree = decay_tree(rows.g)
    return WithinChunk(rows, tree, *interactions(rows.q, rows.k, tree, options.pairs))


def keys(options: KernelOptions, x: WithinChunk) -> Keys:
    """Decayed keys of a chunk and the inverse of its triangular system. Nearly every product of the
    inverse waits for the one before it."""
    q, k, beta = x.rows.q, x.rows.k, x.rows.beta
    inverse = INVERSES[options.inverse](beta * x.kk, options.solve)
    return Keys(inverse, k * x.tree.prefix, q * x.tree.prefix, k * x.tree.suffix)


def written(options: KernelOptions, x: WithinChunk, s: Keys, state: Array) -> tuple[Array, Array]:
    """``[C, V]`` values minus what their keys read from the state, and what is written at each token."""
    error = x.rows.v - product(s.kp, state, NT, options.state)
    return error, product(s.inverse, x.rows.beta * error, NN, options.values)


def forward_step(options: KernelOptions, x: WithinChunk, state: Array) -> tuple[Array, Array]:
    """Output ``[C, V]`` of the chunk, and the state ``[V, K]`` after it."""
    C = x.qk.shape[0]
    s = keys(options, x)
    read = product(jnp.concatenate([s.kp, s.qg], axis=0), state, NT, options.state)
    v_new = product(s.inverse, x.rows.beta * (x.rows.v - read[:C]), NN, options.values)
    o = read[C:] + product(x.qk, v_new, NN, options.values)
    return o, state * x.tree.total[:1] + product(v_new, s.kg, TN, options.state)
