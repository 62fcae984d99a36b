"""A call on one rank: which parts are computed, what is exchanged, and how the states of slices are found.

Forward: every rank finds the map of its leaving part; one gather; every rank folds the maps of the ranks before it into
the state that its entering part starts from. Backward: no gradient flows through the maps. Every rank finds what its
entering part contributes to the gradient of the state before it; one gather; every rank folds those of the ranks
behind it, with the transitions of the forward, into the gradient of the state its leaving part ends in.

States here are ``[N, HV, K, V]`` (K-first) in the dtype that a slice's request says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from array_api_compat import array_namespace, device

from kdacore.parallel.fold import applied, folded, narrowed, widened
from kdacore.parallel.layout import Layout
from kdacore.types import Array, InputGrads, OutputGrads, Outputs, Request, SliceFunctions


class Ranks(Protocol):
    """The ranks that share a row, as one of them."""

    size: int
    rank: int

    def all_gather(self, x: Array) -> Callable[[], Array]:
        """Start gathering an array of every rank, in their order. The result waits for it: ``[size, *x.shape]``."""
        ...

    def all_reduce(self, x: Array) -> Array:
        """The sum over ranks. ``x`` may be overwritten."""
        ...


class Slice(NamedTuple):
    """One rank's slice of a call."""

    request: Request
    """As :class:`kdacore.types.SliceFunctions` takes it."""
    functions: SliceFunctions
    ranks: Ranks


class Residuals(NamedTuple):
    """What a backward needs besides the inputs."""

    starts: Array
    """``[N, HV, K, V]``: the state that each local part starts from."""
    transitions: Array
    """``[size - 1 - rank, G, HV, K, K]``: M of the ranks behind this one."""
    saved: tuple[Array, ...] = ()
    """The backend's own."""


def forward(
    slice: Slice, inputs: Any, place: Layout | None, initial_state: Array | None
) -> tuple[Outputs, Residuals]:
    """Run one rank's slice. ``final_state``, where asked for, is that of every sequence, on every rank.

    Args:
        slice: of this rank.
        inputs: its arrays; packed, with local offsets.
        place: of the sequences on this rank; None of a row that is not packed.
        initial_state: ``[N, HV, K, V]`` of all sequences; zeros when None.
    """
    request, functions, ranks = slice
    xp = array_namespace(inputs.q)
    M, C, pending = functions.begin(request, inputs, None if place is None else place.leaving)
    wait = ranks.all_gather(xp.concat([M, C], axis=-1))
    # Until the maps are there: what the fold needs besides.
    starts = _zero_states(request, inputs.q) if initial_state is None else initial_state
    gathered = wait()
    M, C = gathered[..., : request.K], gathered[..., request.K :]
    starts = _starts(ranks, M, C, starts, place)
    outputs = functions.finish(request, inputs, pending, starts)
    residuals = Residuals(starts, M[ranks.rank + 1 :, ...], outputs.saved)
    if not request.output_final_state:
        return outputs._replace(saved=()), residuals
    final = outputs.final_state
    if place is not None:
        final = _kept(xp, place.ends_here, final)
    elif ranks.rank < ranks.size - 1:
        final = xp.zeros_like(final)
    return outputs._replace(final_state=ranks.all_reduce(final), saved=()), residuals


def backward(
    slice: Slice, inputs: Any, place: Layout | None, residuals: Residuals, grads: OutputGrads
) -> InputGrads:
    """The gradients of one rank's slice. That of ``initial_state`` is the rank's share, for all N sequences.

    Args:
        slice, inputs, place: as in :func:`forward`.
        residuals: that it returned.
        grads: that reached this rank's copies of the results; ``final_state`` as the local one.
    """
    request, functions, ranks = slice
    starts, transitions, saved = residuals
    xp = array_namespace(inputs.q)
    dfinal = None
    if (
        request.output_final_state
    ):  # whether or not a gradient reached this rank's copy: others may wait for it
        dfinal = ranks.all_reduce(
            _zero_states(request, inputs.q)
            if grads.final_state is None
            else xp.asarray(grads.final_state, copy=True)
        )
        if place is not None:
            dfinal = _kept(xp, place.ends_here, dfinal)
        elif ranks.rank < ranks.size - 1:
            dfinal = None
    grads = OutputGrads(grads.o, dfinal)
    entering = None if place is None else place.entering
    dstart, pending = functions.backward_begin(request, inputs, saved, grads, starts, entering)
    behind = ranks.all_gather(dstart)()[ranks.rank + 1 :, ...]
    ends = _ends(slice, transitions, behind, dfinal, place, inputs.q)
    found = functions.backward_finish(request, inputs, saved, pending, grads, starts, ends)
    if place is not None:
        share = _kept(xp, place.starts_here, found.initial_state)
    else:
        share = found.initial_state if ranks.rank == 0 else xp.zeros_like(found.initial_state)
    return found._replace(initial_state=share)


def _starts(ranks: Ranks, M: Array, C: Array, initial: Array, place: Layout | None) -> Array:
    """The state that each local part starts from: the initial state, or what the ranks before make of it."""
    rank = ranks.rank
    if rank == 0:
        return initial
    before = widened(M[:rank, ...]), widened(C[:rank, ...])
    if place is None:
        return narrowed(folded(*before, widened(initial)), C)
    xp = array_namespace(M)
    # Ranks before the one where the sequence begins hold others: as if they were not there.
    within = _column(xp, _ranks(xp, 0, rank, M) >= place.first_rank, M)
    eye = xp.eye(M.shape[-1], dtype=before[0].dtype, device=device(M))
    M, C = xp.where(within, before[0], eye), xp.where(within, before[1], xp.zeros_like(before[1]))
    state = narrowed(folded(M, C, widened(xp.take(initial, place.entering, axis=0))), initial)
    return _with_row(xp, initial, place.entering, place.enters, state)


def _ends(
    slice: Slice, transitions: Array, behind: Array, dfinal: Array | None, place: Layout | None, like: Array
) -> Array:
    """The gradient of the state that each local part ends in: of its final state, or from the ranks behind."""
    request, _, ranks = slice
    own = _zero_states(request, like) if dfinal is None else dfinal
    first, count = ranks.rank + 1, int(behind.shape[0])
    if not count:
        return own
    xp = array_namespace(behind)
    M, B = widened(transitions), widened(behind)
    if place is not None:
        number = _ranks(xp, first, ranks.size, behind)
        through, within = number < place.last_rank, number <= place.last_rank
        M = xp.where(_column(xp, through, M), M, xp.zeros_like(M))
        B = xp.where(_column(xp, within, B), B, xp.zeros_like(B))
    state = B[count - 1, ...]
    for q in reversed(range(count - 1)):
        state = applied(xp.matrix_transpose(M[q, ...]), state, B[q, ...])
    state = narrowed(state, own)
    return state if place is None else _with_row(xp, own, place.leaving, place.leaves, state)


def _zero_states(request: Request, like: Array) -> Array:
    xp = array_namespace(like)
    shape = (request.N, request.HV, request.K, request.V)
    return xp.zeros(shape, dtype=getattr(xp, request.state_dtype), device=device(like))


def _kept(xp: Any, kept: Array, states: Array) -> Array:
    """The states of some sequences, and zeros for the others. A choice, not a product: the others may be NaN."""
    return xp.where(kept[:, None, None, None], states, xp.zeros_like(states))


def _with_row(xp: Any, states: Array, number: Array, wanted: Array, row: Array) -> Array:
    """The states ``[N, ...]`` with ``row [1, ...]`` in place of that of one sequence, if that is wanted."""
    here = (xp.arange(states.shape[0], dtype=number.dtype, device=device(states)) == number) & wanted
    return xp.where(here[:, None, None, None], row, states)


def _ranks(xp: Any, first: int, end: int, like: Array) -> Array:
    return xp.arange(first, end, dtype=xp.int32, device=device(like))


def _column(xp: Any, flags: Array, like: Array) -> Array:
    """Flags ``[R]`` that broadcast against ``like [R, ...]``."""
    return xp.reshape(flags, (flags.shape[0], *([1] * (len(like.shape) - 1))))
