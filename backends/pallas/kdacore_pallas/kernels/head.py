"""One value head of one chunk, in registers: rows made ready, state-free products, and the step of the state.

Shared by the forward kernel and by the recomputation in the backward kernel. The state is kept transposed,
``[V, K]``, so that its decay lies along lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kdacore.types import Gate
from kdacore_pallas.kernels import inverse as inverses
from kdacore_pallas.kernels.levels import Tree, decay_tree, interactions
from kdacore_pallas.kernels.products import NN, NT, TN, Passes, product

Array = Any
NORM_EPS = 1e-6
INVERSES: dict[str, Callable[[Array, Passes], Array]] = {
    "substitution": inverses.by_substitution,
    "merging": inverses.by_merging,
}


@dataclass(frozen=True)
class Math:
    """What a kernel computes: the options of the call, and how precisely."""

    gate: Gate
    lower_bound: float | None
    scale: float
    l2norm: bool
    beta_sigmoid: bool
    neg_eigval: bool
    pairs: Passes
    """Interaction matrices."""
    values: Passes
    """Effective keys and values, outputs."""
    state: Passes
    """Products that read or write the state."""
    solve: Passes
    """Merging of inverse blocks."""
    inverse: str = "substitution"
    chunk: int = 128
    """Rows of a chunk: 64 or 128 (a grid step is always 128)."""


def log_decay(math: Math, x: Array, slope: Array | float) -> Array:
    """Natural-log decay from ``x = g + bias``; ``slope`` is ``exp(A_log)``."""
    if math.gate == "log":
        return x
    if math.gate == "softplus":
        return -slope * softplus(x)
    assert math.lower_bound is not None
    return math.lower_bound * jax.nn.sigmoid(slope * x)


def softplus(x: Array) -> Array:
    """``log(1 + exp(x))`` without overflow."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def strength(math: Math, beta: Array) -> Array:
    if not math.beta_sigmoid:
        return beta
    return (2.0 if math.neg_eigval else 1.0) * jax.nn.sigmoid(beta)


def normalise(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def row_index(C: int, width: int) -> Array:
    """``[C, width]`` int32: the row of each element."""
    return jax.lax.broadcasted_iota(jnp.int32, (C, width), 0)


def column(row: Array) -> Array:
    """``[1, C]`` to ``[C, 1]``."""
    C = row.shape[1]
    diagonal = row_index(C, C) == jax.lax.broadcasted_iota(jnp.int32, (C, C), 1)
    return jnp.sum(jnp.where(diagonal, row, 0.0), axis=1, keepdims=True)


class Rows(NamedTuple):
    """One head's chunk, float32: ``q`` scaled, ``g`` the log decay, ``beta`` ``[C, 1]``."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


class Prepared(NamedTuple):
    """State-free products of a chunk."""

    tree: Tree
    qk: Array
    kk: Array
    inverse: Array
    kp: Array
    """``k prefix`` ``[C, K]``."""
    w: Array
    u: Array
    qg: Array
    kg: Array


def prepare(math: Math, rows: Rows) -> Prepared:
    q, k, v, g, beta = rows
    tree = decay_tree(g)
    qk, kk = interactions(q, k, tree, math.pairs)
    inverse = INVERSES[math.inverse](beta * kk, math.solve)
    kp = k * tree.prefix
    w = product(inverse, beta * kp, NN, math.values)
    u = product(inverse, beta * v, NN, math.values)
    return Prepared(tree, qk, kk, inverse, kp, w, u, q * tree.prefix, k * tree.suffix)


def corrected(math: Math, x: Prepared, state: Array) -> Array:
    """``v_new`` ``[C, V]``: values minus what the state already answers."""
    return x.u - product(x.w, state, NT, math.state)


def output(math: Math, x: Prepared, v_new: Array, state: Array) -> Array:
    return product(x.qg, state, NT, math.state) + product(x.qk, v_new, NN, math.values)


def advance(math: Math, x: Prepared, v_new: Array, state: Array) -> Array:
    """The state ``[V, K]`` after the chunk."""
    return state * x.tree.total[:1] + product(v_new, x.kg, TN, math.state)
