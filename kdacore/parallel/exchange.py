"""A torch call on one rank: which parts are computed, what is exchanged, and how the states of slices are found.

Forward: every rank finds the map of its leaving part; one gather; every rank folds the maps of the ranks before it into
the state that its entering part starts from. Backward: no gradient flows through the maps. Every rank finds what its
entering part contributes to the gradient of the state before it; one gather; every rank folds those of the ranks
behind it, with the transitions of the forward, into the gradient of the state its leaving part ends in.

Both gathers carry the mark of the call. Where marks differ the ranks are not at the same call, and everything that
depends on what was exchanged becomes NaN, so that nothing passes for a result. This is decided on the device, without
waiting on the host. Where the ranks meet on the host anyway it is an error. A rank that fails gives NaN to what the
others wait for, and raises.

States here are ``[N, HV, K, V]`` (K-first) in the dtype that a slice's request says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from kdacore.parallel.call_marks import MARKS
from kdacore.parallel.layout import Layout, ends_here, starts_here
from kdacore.parallel.progress import Progress
from kdacore.parallel.torch_fold import folded, folded_back
from kdacore.types import InputGrads, OutputGrads, Outputs, Request, SliceFunctions


class Ranks(Protocol):
    """The ranks that share a row, as one of them."""

    size: int
    rank: int
    progress: Progress

    def all_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start gathering an array of every rank, in their order. The result waits for it: ``[size, *x.shape]``."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. ``x`` may be overwritten."""
        ...


class Slice(NamedTuple):
    """One rank's slice of a call."""

    request: Request
    """The request of the slice, as :class:`kdacore.types.SliceFunctions` takes it."""
    functions: SliceFunctions
    ranks: Ranks
    on_host: bool = False
    """The ranks meet on the host before each step, so what is found to be wrong may be read there."""


class Residuals(NamedTuple):
    """What a backward needs besides the inputs."""

    start: torch.Tensor
    """``[G, HV, K, V]``: the state that the entering part of each row starts from. The others start from their initial
    states, so they are not kept."""
    transitions: torch.Tensor
    """``[size - 1 - rank, G, HV, K, K]``: M of the ranks behind this one. Of the last rank it is not used, and may be
    missing."""
    marks: torch.Tensor
    """``[MARKS]``: the mark of the call."""
    saved: tuple[torch.Tensor, ...] = ()
    """The backend's own."""
    number: int | None = None
    """Number of the call, where it is known on the host."""


class Rows(NamedTuple):
    """A packed row on one rank."""

    cu_seqlens: torch.Tensor
    """Over the whole row, in a dtype that holds its length."""
    place: Layout


def forward(
    slice: Slice, inputs: Any, rows: Rows | None, initial_state: torch.Tensor | None, mark: float
) -> tuple[Outputs, Residuals]:
    """Run one rank's slice. ``final_state``, where asked for, is that of every sequence, on every rank.

    Args:
        slice: of this rank.
        inputs: its arrays; packed, with local offsets.
        rows: the sequences on this rank; None of rows that are not packed.
        initial_state: ``[N, HV, K, V]`` of all sequences; zeros when None.
        mark: of the call, :mod:`kdacore.parallel.call_marks`.

    Raises:
        RuntimeError: another rank has failed, and the ranks meet on the host.
    """
    request, functions, ranks, _ = slice
    try:
        M, C, pending = functions.begin(request, inputs, None if rows is None else rows.place.leaving)
    except Exception:
        _fail(slice, inputs.q, _rows(request) * request.HV * request.K * (request.K + request.V))
        if request.output_final_state and not slice.on_host:  # there the others raise after the gather
            _fail_sum(slice, inputs.q)
        raise
    marks = M.new_full((MARKS,), mark)
    gathered = ranks.all_gather(torch.cat([M.reshape(-1), C.reshape(-1), marks]))()
    sizes = (M.numel(), C.numel(), MARKS)
    flat_transitions, flat_states, found_marks = gathered.split_with_sizes(sizes, 1)
    in_step = _in_step(slice, found_marks, marks)
    transitions, states = flat_transitions.view(-1, *M.shape), flat_states.view(-1, *C.shape)
    initial = initial_state
    blank = None
    if rows is None:
        if initial is None and ranks.rank == 0:
            initial = _zero_states(request, inputs.q)
        start = _unless(in_step, _start(slice, transitions, states, initial, rows))
    else:
        # Of all sequences: what ranks that are not in step make of the final states would be wrong for any of them.
        if initial is None:
            blank = _blank(request, in_step)
            initial = blank.expand(request.N, request.HV, request.K, request.V).contiguous()
        else:
            initial = _unless(in_step, initial)
        start = _start(slice, transitions, states, initial, rows)
    try:
        outputs = functions.finish(request, inputs, pending, _all_starts(initial, start, rows))
    except Exception:
        if request.output_final_state:
            _fail_sum(slice, inputs.q)
        raise
    residuals = Residuals(start, transitions[ranks.rank + 1 :], marks, outputs.saved)
    if not request.output_final_state:
        return outputs._replace(saved=()), residuals
    if blank is None:
        blank = _blank(request, in_step)
    final = _of_sequences(slice, rows, ends_here, ranks.size - 1, outputs.final_state, blank)
    return outputs._replace(final_state=ranks.all_reduce(final), saved=()), residuals


def backward(
    slice: Slice,
    inputs: Any,
    rows: Rows | None,
    initial_state: torch.Tensor | None,
    residuals: Residuals,
    grads: OutputGrads,
) -> InputGrads:
    """The gradients of one rank's slice. That of ``initial_state`` is the rank's share, for all N sequences.

    Args:
        slice, inputs, rows, initial_state: as in :func:`forward`.
        residuals: that it returned.
        grads: that reached this rank's copies of the results; ``final_state`` as the local one.

    Raises:
        RuntimeError: as :func:`forward`.
    """
    request, functions, ranks, _ = slice
    start, transitions, marks, saved, _ = residuals
    dfinal = None
    if request.output_final_state:
        # Whether or not a gradient reached this rank's copy: it may have reached others'.
        given = grads.final_state
        mine = _zero_states(request, inputs.q) if given is None else given.clone()
        dfinal = _of_sequences(slice, rows, ends_here, ranks.size - 1, ranks.all_reduce(mine))
    grads = OutputGrads(grads.o, dfinal)
    entering = None if rows is None else rows.place.entering
    initial = initial_state
    if initial is None and rows is not None:
        initial = _zero_states(request, inputs.q)
    starts = _all_starts(initial, start, rows)
    try:
        dstart, pending = functions.backward_begin(request, inputs, saved, grads, starts, entering)
    except Exception:
        _fail(slice, inputs.q, _rows(request) * request.HV * request.K * request.V)
        raise
    gathered = ranks.all_gather(torch.cat([dstart.reshape(-1), marks]))()
    contributed, found_marks = gathered.split_with_sizes((dstart.numel(), MARKS), 1)
    in_step = _in_step(slice, found_marks, marks)
    behind = contributed[ranks.rank + 1 :].view(-1, *dstart.shape)
    ends = dfinal
    if ends is None and (rows is not None or ranks.rank == ranks.size - 1):
        ends = _zero_states(request, inputs.q)
    ends = _unless(in_step, _ends(slice, transitions, behind, ends, rows))
    found = functions.backward_finish(request, inputs, saved, pending, grads, starts, ends)
    if initial_state is None:
        return found
    blank = _blank(request, in_step)
    share = _of_sequences(slice, rows, starts_here, 0, found.initial_state, blank)
    return found._replace(initial_state=share)


def _in_step(slice: Slice, gathered: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """bool ``[]``: every rank was at this call when it gave its marks, ``[size, MARKS]``."""
    found = gathered.eq(marks).all()
    if slice.on_host and not found.is_cuda and not found:
        own = slice.ranks.rank
        wrong = [r for r, x in enumerate(gathered[:, -1].tolist()) if x != marks[0].item() and r != own]
        of = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))} of cp"
        raise RuntimeError(f"{slice.request.op}: {of} failed in this call; the error there says why")
    flag = slice.ranks.progress.in_step.get(found.device)
    if flag is not None:
        flag.logical_and_(found)
    return found


def _fail(slice: Slice, like: torch.Tensor, count: int) -> None:
    """Take part with NaN in a gather of ``count`` numbers and the marks, since this rank has failed."""
    dtype = getattr(torch, slice.request.state_dtype)
    flag = slice.ranks.progress.in_step.get(like.device)
    if flag is not None:  # as on the other ranks
        flag.fill_(False)
    # The error at hand says more than one of the exchange.
    with contextlib.suppress(RuntimeError):
        slice.ranks.all_gather(like.new_full((count + MARKS,), torch.nan, dtype=dtype))()


def _fail_sum(slice: Slice, like: torch.Tensor) -> None:
    """Take part with NaN in the sum of final states."""
    with contextlib.suppress(RuntimeError):
        slice.ranks.all_reduce(torch.full_like(_zero_states(slice.request, like), torch.nan))


def _unless(in_step: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x``, or NaN where the ranks are not in step."""
    return torch.where(in_step, x, torch.nan)


def _blank(request: Request, in_step: torch.Tensor) -> torch.Tensor:
    """``[]``: zero, or NaN where the ranks are not in step."""
    return torch.where(in_step, 0.0, torch.nan).to(getattr(torch, request.state_dtype))


def _rows(request: Request) -> int:
    """Maps that a rank exchanges for each value head."""
    return 1 if request.packed else request.B


def _start(
    slice: Slice, M: torch.Tensor, C: torch.Tensor, initial: torch.Tensor | None, rows: Rows | None
) -> torch.Tensor:
    """The state that the entering part of each row starts from: what the ranks before make of its initial state, or
    that itself. ``initial``: None for zeros, of rows that are not packed, behind the first rank."""
    rank = slice.ranks.rank
    before = initial if rows is None or initial is None else initial.index_select(0, rows.place.entering)
    if rank == 0 and before is not None:
        return before
    M, C = M[:rank], C[:rank]
    if rows is not None and rank > 1:  # ranks before the one where the sequence begins hold others
        place = rows.place
        within = _multiples(1, rank + 1, slice.request.T, place.begins) > place.begins[0]
        unchanged = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        M = torch.where(_column(within, M), M, unchanged)
        C = torch.where(_column(within, C), C, 0.0)
    state = folded(M, C, before)
    if rows is None or before is None:
        return state
    return torch.where(rows.place.enters[:, None, None, None], state, before)


def _all_starts(initial: torch.Tensor | None, start: torch.Tensor, rows: Rows | None) -> torch.Tensor:
    """``[N, HV, K, V]``: the state that each local part starts from."""
    if rows is None or initial is None:
        return start
    return initial.index_copy(0, rows.place.entering.long(), start)


def _ends(
    slice: Slice,
    transitions: torch.Tensor,
    behind: torch.Tensor,
    ends: torch.Tensor | None,
    rows: Rows | None,
) -> torch.Tensor:
    """The gradient of the state that each local part ends in: of its final state, or from the ranks behind.

    ``ends``: those of final states; None for zeros, of rows that are not packed, before the last rank.
    """
    ranks, count = slice.ranks, behind.shape[0]
    if not count and ends is not None:
        return ends
    if rows is not None and count > 1:  # ranks behind the one where the sequence ends hold others
        end = rows.place.ends[1]
        begins_of_ranks = _multiples(ranks.rank + 1, ranks.size + 1, slice.request.T, end)
        within = begins_of_ranks < end
        behind = torch.where(_column(within[:-1], behind), behind, 0.0)
        transitions = transitions[: count - 1]
        transitions = torch.where(_column(within[1:-1], transitions), transitions, 0.0)
    state = folded_back(transitions, behind)
    if rows is None or ends is None:
        return state
    place = rows.place
    own = ends.index_select(0, place.leaving)
    end = torch.where(place.leaves[:, None, None, None], state, own)
    return ends.index_copy(0, place.leaving.long(), end)


def _zero_states(request: Request, like: torch.Tensor) -> torch.Tensor:
    shape = (request.N, request.HV, request.K, request.V)
    return torch.zeros(shape, dtype=getattr(torch, request.state_dtype), device=like.device)


def _of_sequences(
    slice: Slice,
    rows: Rows | None,
    here: Callable[..., torch.Tensor],
    rank: int,
    states: torch.Tensor,
    blank: torch.Tensor | None = None,
) -> torch.Tensor:
    """The states of the sequences that are ``here``, and ``blank`` (zeros) for the others; not packed, all are on one
    rank.

    A choice, not a product: the others may be NaN.
    """
    if rows is None:
        if slice.ranks.rank == rank:
            return states
        return torch.zeros_like(states) if blank is None else blank.expand_as(states).contiguous()
    kept = here(rows.cu_seqlens, slice.ranks.rank, slice.request.T)
    return torch.where(kept[:, None, None, None], states, 0.0 if blank is None else blank)


def _multiples(first: int, end: int, step: int, like: torch.Tensor) -> torch.Tensor:
    """``[first * step, ..., (end - 1) * step]``."""
    return torch.arange(first * step, end * step, step, dtype=like.dtype, device=like.device)


def _column(flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Flags ``[R]`` that broadcast against ``like [R, ...]``."""
    return flags.reshape(-1, *[1] * (like.dim() - 1))
