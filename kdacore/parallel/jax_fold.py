"""States across the ranks of a JAX mesh axis from the maps of their slices. Every rank computes all it needs itself.

A slice maps the state of the sequence that leaves it by ``S_out = M S_in + C``; ``M [..., K, K]`` and states
``[..., K, V]``, float32. Products are full float32: where decays are slow M is close to the identity over thousands of
tokens, and a product in bfloat16 or TF32 would lose what the ranks before contributed.

:mod:`kdacore.parallel.fold` composes as many maps as it is given. Here how many concern a rank depends on its number,
a tracer, so every rank goes through the maps of all and keeps what concerns it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from kdacore.arrays.jax_meshes import mesh_axes, varying
from kdacore.parallel.jax_layout import Borders

Array = Any
_FULL = lax.Precision.HIGHEST


def apply(M: Array, S: Array) -> Array:
    """``M S`` in full float32."""
    return jnp.einsum("...ij,...jv->...iv", M, S, precision=_FULL, preferred_element_type=jnp.float32)


def apply_transposed(M: Array, D: Array) -> Array:
    """``M^T D`` in full float32."""
    return jnp.einsum("...ji,...jv->...iv", M, D, precision=_FULL, preferred_element_type=jnp.float32)


def state_before(rank: Array, borders: Borders, M: Array, C: Array, initial: Array | None) -> Array:
    """The state after the last token before a rank, of the sequence that holds it.

    Args:
        rank: int32.
        borders: of all R ranks.
        M, C: ``[R, G, HV, K, K]`` and ``[R, G, HV, K, V]`` of all ranks; G is 1 for a pack and B for rows.
        initial: ``[N, HV, K, V]`` initial states of the sequences (N is B for rows); None for zeros.

    Returns:
        ``[G, HV, K, V]``. Only the sequence that enters the rank has a use for it.
    """
    group = C.shape[1]

    def after(S: Array, x: Any) -> tuple[Array, None]:
        q, leaving, passes, M_q, C_q = x
        first = jnp.zeros_like(S)
        if initial is not None:
            at = jnp.minimum(leaving, initial.shape[0] - group)
            first = lax.dynamic_slice_in_dim(initial, at, group)
        S_out = apply(M_q, jnp.where(passes, S, first)) + C_q
        return jnp.where(q < rank, S_out, S), None

    ranks = jnp.arange(C.shape[0], dtype=jnp.int32)
    axes = mesh_axes(rank, *borders, M, C, initial)
    state, _ = lax.scan(
        after, varying(jnp.zeros_like(C[0]), axes), (ranks, borders.leaving, borders.passes, M, C)
    )
    return state


def gradient_behind(rank: Array, borders: Borders, M: Array, B: Array) -> Array:
    """The gradient of the state at the end of a rank, of the sequence that holds its last token, from the ranks behind.

    Args:
        rank: int32.
        borders: of all R ranks.
        M: ``[R, G, HV, K, K]`` of all ranks.
        B: ``[R, G, HV, K, V]``: of each rank the gradient of the state before its first token, when nothing
            comes from the ranks behind.

    Returns:
        ``[G, HV, K, V]``; zeros where the sequence does not go on in the next rank.
    """

    def before(D: Array, x: Any) -> tuple[Array, None]:
        q, passes, continues, M_q, B_q = x
        D_in = jnp.where(passes & continues, apply_transposed(M_q, D), 0.0) + B_q
        return jnp.where(q > rank, D_in, D), None

    ranks = jnp.arange(B.shape[0], dtype=jnp.int32)
    scanned = (ranks, borders.passes, borders.continues, M, B)
    axes = mesh_axes(rank, *borders, M, B)
    D, _ = lax.scan(before, varying(jnp.zeros_like(B[0]), axes), scanned, reverse=True)
    return jnp.where(borders.continues[rank], D, 0.0)
