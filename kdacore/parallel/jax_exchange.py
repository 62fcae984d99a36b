"""A rank's forward and backward: what is computed, what is exchanged, and how the states of slices are found.

Forward, each rank computes the map of its slice (``M``, ``C``), all maps are gathered at once, and each rank folds
them to the state it starts from. Backward, each rank computes the gradient that its slice gives to the state before it,
these are gathered, and each rank folds them, with the maps of the forward, to the gradient behind it. What is exchanged
does not depend on the number of tokens. No gradient is taken through ``M`` and ``C``.

Offsets that are tracers and no offsets of the row give NaN, in every result and gradient.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from kdacore.arrays import jax_meshes
from kdacore.parallel import jax_fold
from kdacore.parallel.jax_layout import Place, of_states, place_of
from kdacore.parallel.local_call import states_in, states_out
from kdacore.types import ChunkInputs, InputGrads, OutputGrads, Outputs, Request, SliceFunctions

Array = Any


@dataclass(frozen=True)
class Across:
    """A mesh axis whose ranks share a row."""

    axis: str
    ranks: int

    def gathered(self, x: Array) -> Array:
        """``[R, ...]``: ``x`` of every rank."""
        return lax.all_gather(x, self.axis)

    def summed(self, x: Array) -> Array:
        """The sum over the ranks, which JAX then knows to be the same on all."""
        return lax.psum(x, self.axis)

    def place(self, T: int, cu_seqlens: Array | None) -> Place:
        """Where this rank lies in the row, from the offsets of the whole row."""
        return place_of(lax.axis_index(self.axis).astype(jnp.int32), self.ranks, T, cu_seqlens)


@dataclass(frozen=True)
class SliceCall:
    """A rank's forward and backward, in the caller's terms. Programs are kept by it: equal ones do the same."""

    own: Request
    """The slice's own call."""
    across: Across
    backend: str
    slices: SliceFunctions = field(compare=False)

    def __call__(self, request: Request, inputs: ChunkInputs) -> Outputs:
        """The forward. ``final_state`` is that of the local parts; of all ranks' only those that end here count."""
        own = dataclasses.replace(self.own, needs_grad=request.needs_grad)
        place = self.across.place(request.T, inputs.cu_seqlens)
        local = _local(inputs, place)
        part = self.slices.begin(own, local, None if place.part is None else place.part.last)
        maps = self.across.gathered(jnp.concatenate([part.M, part.C], -1))
        M, C = maps[..., : request.K], maps[..., request.K :]
        initial = states_in(request, inputs.initial_state)
        before = jax_fold.state_before(place.rank, place.borders, M, C, initial)
        if initial is None:
            initial = jnp.zeros(own.state_shape, before.dtype)
        starts = _if_valid(place, jnp.where(place.entering(), before, initial))
        out = self.slices.finish(own, local, part.pending, starts)
        final = states_out(request, out.final_state)
        return Outputs(out.o, final, states_out(request, out.checkpoints), (starts, M, out.saved))

    def backward(self, request: Request, inputs: ChunkInputs, saved: Any, grads: OutputGrads) -> InputGrads:
        """The gradients; of what all ranks hold, this rank's share."""
        starts, M, kept = saved
        place = self.across.place(request.T, inputs.cu_seqlens)
        local, first = _local(inputs, place), None if place.part is None else place.part.first
        grads = OutputGrads(grads.o, states_in(request, grads.final_state))
        before, pending = self.slices.backward_begin(self.own, local, kept, grads, starts, first)
        behind = jax_fold.gradient_behind(place.rank, place.borders, M, self.across.gathered(before))
        here = jnp.zeros_like(starts) if grads.final_state is None else grads.final_state
        ends = _if_valid(place, jnp.where(place.leaves(), behind, here))
        d = self.slices.backward_finish(self.own, local, kept, pending, grads, starts, ends)
        if inputs.initial_state is None:
            return d._replace(initial_state=None)
        share = states_out(request, _if_valid(place, jnp.where(place.begins(), d.initial_state, 0.0)))
        return d._replace(initial_state=jax_meshes.summed_like(share, inputs.initial_state))


def final_states(request: Request, inputs: ChunkInputs, across: Across, final: Array) -> Array:
    """``final_state`` on every rank: of each sequence from the rank that holds its last token."""
    place = across.place(request.T, inputs.cu_seqlens)
    own = jnp.where(place.ends(), final, jnp.zeros_like(final))
    if inputs.initial_state is not None and inputs.cu_seqlens is not None:
        empty = of_states(inputs.cu_seqlens[1:] == inputs.cu_seqlens[:-1])
        own = jnp.where(empty & (place.rank == 0), inputs.initial_state, own)
    return across.summed(_if_valid(place, own))


def _if_valid(place: Place, x: Array) -> Array:
    """``x``, or NaN where the offsets are none of the row."""
    return x if place.valid is None else jnp.where(place.valid, x, jnp.nan)


def _local(inputs: ChunkInputs, place: Place) -> ChunkInputs:
    """The arrays of the slice's own call."""
    inputs = inputs._replace(initial_state=None, cu_seqlens_cpu=None)
    return inputs if place.part is None else inputs._replace(cu_seqlens=place.part.offsets)
