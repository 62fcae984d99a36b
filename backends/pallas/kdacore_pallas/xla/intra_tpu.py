"""Within a chunk on TPUs: the same functions as :mod:`.intra`, of whole ``[C, K]`` and ``[C, C]`` arrays alone.

The matrix unit and the registers of a TPU work on tiles of 8 x 128 numbers: the tree's blocks of one, two or four rows
would be padded to that, each level differently. Here a level has arrays as large as every other. Its decay factors are
``exp(M g)`` with a matrix ``M`` of zeros and ones: row i of a right half sums ``g`` from the first row of that half
through i, row j of a left half sums it after j to the end of that half. So every factor is in [0, 1], whatever the
gate, and no difference of sums is ever taken. The products of a level are those of all rows, and what is no pair of
that level is masked out.

A gate with one channel needs no tree: the decay from j to i is ``exp`` of the sum over the rows after j through i, one
number for each pair.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore_pallas.xla.intra import Interactions, IntraGrads
from kdacore_pallas.xla.numerics import F32, dot, mesh_axes, total, varying

Array = Any
FLOOR = -1e30
"""Log decays below are raised to this, because minus infinity times zero is not a number. They decay everything to
zero in any case."""


class Decays(NamedTuple):
    """Decay factors of a chunk, each in [0, 1]."""

    prefix: Array
    """``[..., C, K]`` from the chunk's start through the row."""
    suffix: Array
    """``[..., C, K]`` after the row, to the chunk's end."""
    total: Array
    """``[..., 1, K]`` of the whole chunk."""
    log: Array
    """``[..., C, K]`` log decay of each row, finite."""


def decays(g: Array) -> Decays:
    """Factors from the log decay ``g`` ``[..., C, K]``."""
    log = jnp.maximum(g, FLOOR)
    both = _sums(_through_and_after(g.shape[-2]), log)
    prefix, suffix = jnp.split(jnp.exp(both), 2, -2)
    return Decays(prefix, suffix, prefix[..., -1:, :], log)


def interactions(q: Array, k: Array, beta: Array, decay: Decays, precision: lax.Precision) -> Interactions:
    """The three matrices of each chunk. ``q``, ``k`` ``[..., C, K]``; ``beta`` ``[..., C, 1]``."""
    qk, kk = (_pairs_of_scalars if _scalar(decay) else _pairs)(q, k, decay, precision)
    return Interactions(qk, kk, _inverse(beta * kk))


def interactions_backward(
    q: Array,
    k: Array,
    decay: Decays,
    dqk: Array,
    dkk: Array,
    dprefix: Array,
    dsuffix: Array,
    dtotal: Array,
    precision: lax.Precision,
) -> IntraGrads:
    """Backward of :func:`interactions` (not of its inverse) and of :func:`decays`; arguments as in
    :func:`kdacore_pallas.xla.intra.interactions_backward`."""
    C = q.shape[-2]
    pairs = _pairs_of_scalars_backward if _scalar(decay) else _pairs_backward
    found = pairs(q, k, decay, dqk, dkk, precision)
    g = _sums(_through_and_after(C).T, jnp.concatenate([dprefix, dsuffix], -2)) + dtotal
    return found._replace(g=found.g + g)


# --- sums over rows -----------------------------------------------------------------------------------------


def _through(C: int) -> Array:
    """``[C, C]``: each row sums the rows up to itself."""
    return jnp.tri(C, dtype=F32)


def _through_and_after(C: int) -> Array:
    """``[2 C, C]``: the same, and below it each row sums the rows after itself."""
    return jnp.concatenate([_through(C), jnp.tri(C, k=-1, dtype=F32).T])


class Levels(NamedTuple):
    """The tree's levels, s = 1, 2, 4, ..., stacked along the first axis.

    They are computed one after another in a loop: each is the same few operations, and the compiler
    needs 0.1 to 0.5 s for a product. Computed inside the loop, the masks would be operations of
    their own. They are computed, not constants, because what XLA partitions may hold no constants.
    """

    sums: Array
    """``[levels, C, C]`` float32 zeros and ones: rows in right halves of blocks of ``2 s`` rows sum
    their half up to themselves, those in left halves sum what follows them in theirs."""
    pairs: Array
    """``[levels, C, C]`` bool: row i lies in the right half and column j in the left half of the
    same block."""


def levels(C: int) -> Levels:
    """The levels of a chunk of ``C`` rows, a power of two."""
    shape = (C.bit_length() - 1, C, C)
    n, i, j = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
    right = (i >> n) & 1 == 1
    same_half = i >> n == j >> n
    summed = same_half & jnp.where(right, j <= i, j > i)
    return Levels(summed.astype(F32), ((i ^ j) >> n == 1) & (i > j))


def _sums(which: Array, x: Array) -> Array:
    """Sums over rows of ``x`` ``[..., C, K]``, those that a matrix of zeros and ones names, in float32."""
    return dot("ij,...jk->...ik", jnp.asarray(which, F32), x, lax.Precision.HIGHEST)


# --- a decay for each channel -------------------------------------------------------------------------------


def _scalar(decay: Decays) -> bool:
    return bool(decay.log.shape[-1] == 1)


def _pairs(q: Array, k: Array, decay: Decays, precision: lax.Precision) -> tuple[Array, Array]:
    """``qk`` and ``kk`` of :class:`Interactions`."""
    C = q.shape[-2]

    def level(so_far: Array, x: tuple[Array, Array]) -> tuple[Array, None]:
        sums, pairs = x
        factor = jnp.exp(_sums(sums, decay.log))
        columns = k * factor
        both = dot("...ik,...jk->...ij", jnp.concatenate([q * factor, columns], -2), columns, precision)
        return jnp.where(pairs, both, so_far), None

    own = jnp.broadcast_to(total(q * k, -1), (*decay.log.shape[:-1], 1))
    start = varying(jnp.where(jnp.eye(C, dtype=bool), own, 0.0), mesh_axes(q, k, decay.log))
    sums, pairs = levels(C)
    twice = jnp.concatenate([pairs, pairs], 1)
    both, _ = lax.scan(level, jnp.concatenate([start, jnp.zeros_like(start)], -2), (sums, twice))
    return both[..., :C, :], both[..., C:, :]


def _pairs_backward(
    q: Array, k: Array, decay: Decays, dqk: Array, dkk: Array, precision: lax.Precision
) -> IntraGrads:
    """Gradients of :func:`_pairs`: those of ``g`` are sums of the gradients of each level's log factors."""
    C = q.shape[-2]
    d = jnp.concatenate([dqk, dkk], -2)

    def level(so_far: IntraGrads, x: tuple[Array, Array]) -> tuple[IntraGrads, None]:
        sums, pairs = x
        factor = jnp.exp(_sums(sums, decay.log))
        rows, columns = q * factor, k * factor
        own = jnp.where(pairs, d, 0.0)
        from_rows = dot("...ij,...jk->...ik", own, columns, precision)
        drows = from_rows[..., :C, :]
        dcolumns = dot("...ij,...ik->...jk", own, jnp.concatenate([rows, columns], -2), precision)
        dcolumns = dcolumns + from_rows[..., C:, :]
        dq, dk, dg = so_far
        dg = dg + _sums(sums.T, rows * drows + columns * dcolumns)
        return IntraGrads(dq + drows * factor, dk + dcolumns * factor, dg), None

    own = total(jnp.where(jnp.eye(C, dtype=bool), dqk, 0.0), -1)
    axes = mesh_axes(q, k, decay.log, d)
    start = IntraGrads(*(varying(x, axes) for x in (own * k, own * q, jnp.zeros_like(decay.log))))
    sums, pairs = levels(C)
    grads: IntraGrads
    grads, _ = lax.scan(level, start, (sums, jnp.concatenate([pairs, pairs], 1)))
    return grads


# --- one decay for all channels -----------------------------------------------------------------------------


def _pair_decays(decay: Decays) -> Array:
    """``[..., C, C]``: the decay from each row j to each row i >= j; zero where there is none."""
    C = decay.log.shape[-2]
    log = _sums(_through(C), jnp.where(jnp.tri(C, k=-1, dtype=bool), decay.log, 0.0))
    return jnp.where(jnp.tri(C, dtype=bool), jnp.exp(log), 0.0)


def _pairs_of_scalars(q: Array, k: Array, decay: Decays, precision: lax.Precision) -> tuple[Array, Array]:
    """:func:`_pairs` of a gate with one channel."""
    between = _pair_decays(decay)
    qk = dot("...ik,...jk->...ij", q, k, precision) * between
    kk = dot("...ik,...jk->...ij", k, k, precision) * between
    return qk, jnp.where(jnp.tri(q.shape[-2], k=-1, dtype=bool), kk, 0.0)


def _pairs_of_scalars_backward(
    q: Array, k: Array, decay: Decays, dqk: Array, dkk: Array, precision: lax.Precision
) -> IntraGrads:
    """Gradients of :func:`_pairs_of_scalars`. A row's log decay is part of every pair from before it to itself or
    after."""
    C = q.shape[-2]
    before = jnp.tri(C, k=-1, dtype=bool)
    between = _pair_decays(decay)
    dqk = dqk * between
    dkk = jnp.where(before, dkk * between, 0.0)
    dq = dot("...ij,...jk->...ik", dqk, k, precision)
    dk = dot("...ij,...ik->...jk", dqk, q, precision) + dot("...ij,...jk->...ik", dkk, k, precision)
    dk = dk + dot("...ij,...ik->...jk", dkk, k, precision)
    pairs = dqk * dot("...ik,...jk->...ij", q, k, precision) + dkk * dot(
        "...ik,...jk->...ij", k, k, precision
    )
    dg = total(jnp.where(before, _sums(_through(C).T, pairs), 0.0), -1)
    return IntraGrads(dq, dk, dg)


# --- the triangular inverse ---------------------------------------------------------------------------------


def _inverse(lower: Array) -> Array:
    """``(I + lower)^-1`` of a strictly lower triangular matrix, by exact block substitution, in float32 throughout:
    every level inherits the error of the one below."""
    C = lower.shape[-1]
    precision = lax.Precision.HIGHEST

    def level(inverse: Array, pairs: Array) -> tuple[Array, None]:
        corner = jnp.where(pairs, lower, 0.0)
        inner = dot("...ij,...jk->...ik", corner, inverse, precision)
        return inverse - dot("...ij,...jk->...ik", inverse, inner, precision), None

    pairs = levels(C).pairs
    return lax.scan(level, jnp.eye(C, dtype=F32) - jnp.where(pairs[0], lower, 0.0), pairs[1:])[0]
