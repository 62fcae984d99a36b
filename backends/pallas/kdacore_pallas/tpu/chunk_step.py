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


class Met(NamedTuple):
    """What comes of a chunk's rows alone, before its system is solved."""

    rows: Rows
    tree: Tree
    qk: Array
    kk: Array


class Prepared(NamedTuple):
    """The products of a chunk that need no state."""

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


def meet(options: KernelOptions, rows: Rows) -> Met:
    """Decays and interactions."""
    tree = decay_tree(rows.g)
    return Met(rows, tree, *interactions(rows.q, rows.k, tree, options.pairs))


def solve(options: KernelOptions, x: Met) -> Prepared:
    """The inverse, and what is multiplied with it. Each of its products waits for the one before."""
    (q, k, v, _, beta), tree, qk, kk = x
    inverse = INVERSES[options.inverse](beta * kk, options.solve)
    kp = k * tree.prefix
    both = product(inverse, beta * jnp.concatenate([kp, v], axis=1), NN, options.values)
    w, u = both[:, : k.shape[1]], both[:, k.shape[1] :]
    return Prepared(tree, qk, kk, inverse, kp, w, u, q * tree.prefix, k * tree.suffix)


def pass_on(options: KernelOptions, x: Prepared, state: Array) -> tuple[Array, Array]:
    """Output of the chunk, and the state after it."""
    C = x.w.shape[0]
    read = product(jnp.concatenate([x.w, x.qg], axis=0), state, NT, options.state)
    v_new = x.u - read[:C]
    return read[C:] + product(x.qk, v_new, NN, options.values), next_state(options, x, v_new, state)


def corrected_values(options: KernelOptions, x: Prepared, state: Array) -> Array:
    """``v_new`` ``[C, V]``: values minus what the keys read from the state."""
    return x.u - product(x.w, state, NT, options.state)


def output(options: KernelOptions, x: Prepared, v_new: Array, state: Array) -> Array:
    return product(x.qg, state, NT, options.state) + product(x.qk, v_new, NN, options.values)


def next_state(options: KernelOptions, x: Prepared, v_new: Array, state: Array) -> Array:
    """The state ``[V, K]`` after the chunk."""
    return state * x.tree.total[:1] + product(v_new, x.kg, TN, options.state)
