"""One chunk of one value head, in registers: the products that need no state, the output and the
next state.

Used by the forward kernel and by the recomputation in the backward kernel. The state is kept
transposed, ``[V, K]``, so that its decay lies along lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


def prepare(options: KernelOptions, rows: Rows) -> Prepared:
    q, k, v, g, beta = rows
    tree = decay_tree(g)
    qk, kk = interactions(q, k, tree, options.pairs)
    inverse = INVERSES[options.inverse](beta * kk, options.solve)
    kp = k * tree.prefix
    w = product(inverse, beta * kp, NN, options.values)
    u = product(inverse, beta * v, NN, options.values)
    return Prepared(tree, qk, kk, inverse, kp, w, u, q * tree.prefix, k * tree.suffix)


def corrected_values(options: KernelOptions, x: Prepared, state: Array) -> Array:
    """``v_new`` ``[C, V]``: values minus what the keys read from the state."""
    return x.u - product(x.w, state, NT, options.state)


def output(options: KernelOptions, x: Prepared, v_new: Array, state: Array) -> Array:
    return product(x.qg, state, NT, options.state) + product(x.qk, v_new, NN, options.values)


def next_state(options: KernelOptions, x: Prepared, v_new: Array, state: Array) -> Array:
    """The state ``[V, K]`` after the chunk."""
    return state * x.tree.total[:1] + product(v_new, x.kg, TN, options.state)
