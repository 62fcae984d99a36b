"""Records of candidates: what each token did to a state, kept to be applied to it by a later call.

Replaying a record must give the bits of its token. So both go through :func:`decayed` and :func:`added`, whose products
are rounded by themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.types import Request
from kdacore_pallas.xla.numerics import F32, unfused, varying
from kdacore_pallas.xla.state_pool import dropped

Array = Any
PARTS = ("record_update", "record_key", "record_decay")


class Step(NamedTuple):
    """What a token did to the states of all sequences: ``S = S * decay + key^T update``."""

    update: Array
    """``[N, H, R, V]``."""
    key: Array
    """``[N, H, 1, K]``."""
    decay: Array
    """``[N, H, R, K]``, or 1 in place of K with one decay a head."""


def decayed(state: Array, decay: Array) -> Array:
    """States ``[N, H, R, K, V]`` times their decay."""
    return unfused(state * decay[..., None])


def added(state: Array, step: Step) -> Array:
    """Decayed states with the step's update."""
    return state + unfused(step.key[..., None] * step.update[..., None, :])


def arrays_of(inputs: Any) -> tuple[Array, ...]:
    """The arrays of a call's records; empty without."""
    return () if inputs.record_update is None else tuple([getattr(inputs, name) for name in PARTS])


def replayed(
    request: Request, inputs: Any, rows: StateRows, state: Array, dtype: Any, axes: frozenset[str]
) -> Array:
    """The states after the records that precede the call, rounded to the pool's ``dtype``; those of sequences without
    records as they were."""
    arrays = arrays_of(inputs)
    if not arrays:
        return state
    most = arrays[0].shape[1]
    tails = ((request.H, -1, request.V), (request.H, 1, request.K), (request.H, request.HV // request.H, -1))
    here = dropped(rows.records, arrays[0].shape[0])

    def body(j: Array, states: Array) -> Array:
        found = [jnp.take(x[:, j], here, axis=0, mode="fill", fill_value=0) for x in arrays]
        step = Step(*(x.reshape(request.N, *tail) for x, tail in zip(found, tails, strict=True)))
        new = added(decayed(states, step.decay), step)
        return jnp.where(_spread(j < rows.replayed), new, states)

    steps = jnp.minimum(jnp.max(rows.replayed, initial=0), most)
    found: Array = lax.fori_loop(0, steps, body, varying(state, axes))
    return jnp.where(_spread(rows.records != ZEROS), found.astype(dtype).astype(F32), found)


def kept(arrays: tuple[Array, ...], rows: StateRows, t: Array, alive: Array, step: Step) -> tuple[Array, ...]:
    """The records with what token ``t`` of the sequences that are ``alive`` did."""
    if not arrays:
        return ()
    size = arrays[0].shape[0]
    row = dropped(jnp.where(alive, rows.records, ZEROS), size)
    return tuple(
        x.at[row, t].set(values.reshape(-1, *x.shape[2:]).astype(x.dtype), mode="drop")
        for x, values in zip(arrays, step, strict=True)
    )


def states_left(rows: StateRows, first: Array, last: Array) -> Array:
    """The states that the call writes: ``first``, before its tokens, where there are records, else ``last``."""
    return last if rows.records is None else jnp.where(_spread(rows.records != ZEROS), first, last)


def _spread(of_sequences: Array) -> Array:
    return of_sequences[:, None, None, None, None]
