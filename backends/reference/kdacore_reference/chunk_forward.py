"""``chunk_kda`` and ``chunk_gated_delta_rule`` forward: chunks in parallel, then a short scan over them.

Rows are the negated keys and the queries times the scale, columns the keys times beta. With ``P`` the decayed products
of key rows with the columns before them and ``qk`` those of query rows, a chunk that starts from state ``S`` computes

    errors = (I - P)^-1 (v + key_start S)        what each token has to correct
    o      = query_start S + qk errors
    S'     = total S + end^T errors

where the rows in ``key_start`` and ``query_start`` carry the decay from the chunk's start, the columns in ``end`` that
to its end.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from kdacore.types import Array, ChunkInputs, Outputs, Request
from kdacore_reference.arrays import beside, cast, index_array, namespace, plain, put, store
from kdacore_reference.gates import anchored_rows
from kdacore_reference.intra import Intra, interact
from kdacore_reference.parallel import run_units
from kdacore_reference.plan import CHUNK, Slab, Unit, chunk_count, plan_units
from kdacore_reference.sequences import sequences_of
from kdacore_reference.tokens import KEYS, Flat, empty_rows, flatten, index, scatter_sum, slab_tokens

BLOCKS = 64
"""Chunks times value heads in a slab: small enough for the cache, large enough to hide the cost of a call."""


class Saved(NamedTuple):
    """What the forward keeps for the backward, chunk by chunk of every sequence, in the compute dtype."""

    states: Array
    """``[chunks, HV, K, V]``: at each chunk's start."""
    errors: Array
    """``[chunks, HV, C, V]``: what each token had to correct."""
    inverses: Array
    qks: Array
    """``[chunks, HV, C, C]``: of :class:`~kdacore_reference.intra.Intra`."""


def chunk_forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """The forward of :class:`~kdacore.types.ChunkInputs`; ``saved`` is a :class:`Saved` when gradients are wanted."""
    run = ForwardRun(request, inputs, keep=request.needs_grad)
    run.everything()
    return Outputs(
        o=plain(run.xp.reshape(run.o, (request.B, request.T, request.HV, request.V))),
        final_state=run.final_state() if request.output_final_state else None,
        checkpoints=run.checkpoints() if request.checkpoint_every else None,
        saved=tuple(run.saved) if run.keep else (),
    )


def chunk_saved(request: Request, inputs: ChunkInputs) -> Saved:
    """What ``chunk_forward`` saves for a call that wants gradients, computed again."""
    run = ForwardRun(replace(request, checkpoint_every=0), inputs, keep=True)
    run.everything()
    return run.saved


class Prepared(NamedTuple):
    """A slab before it meets a state."""

    u: Array
    """``[n, H, G, C, V]``: ``errors`` from a state of zeros."""
    intra: Intra
    """With the key rows of ``start`` solved for: what they read is added to ``u``."""


class Scanned(NamedTuple):
    """A slab once its states are known."""

    intra: Intra
    reads: Array
    """``[n, H, G, 2 C, V]``: of keys and queries in turn."""
    errors: Array
    """``[n, H, G, C, V]``."""


class ForwardRun:
    """One forward call: where results are collected while its units run."""

    def __init__(self, request: Request, inputs: ChunkInputs, keep: bool) -> None:
        self.request, self.inputs = request, inputs
        xp = self.xp = namespace(inputs.q)
        self.flat = flatten(request, inputs)
        self.sequences = sequences_of(request, inputs)
        self.o = empty_rows(request, plain(inputs.v), request.HV, request.V)
        self.final = start_states(request, inputs, self.flat)
        where = {"dtype": self.flat.dtype, "device": beside(inputs.q)}
        self.keep = keep
        self.base = anchored_rows(request)
        lead = (sum(chunk_count(s) for s in self.sequences) if keep else 0, request.HV)
        tails = ((request.K, request.V), (CHUNK, request.V), (CHUNK, CHUNK), (CHUNK, CHUNK))
        self.saved = Saved(*(xp.empty((*lead, *tail), **where) for tail in tails))
        if request.checkpoint_every:
            rows = math.prod(request.checkpoint_shape[:-3])
            self.blocks = xp.zeros((rows, request.HV, request.K, request.V), **where)
            counts = [-(-s.length // request.checkpoint_every) for s in self.sequences]
            self.first_block = dict(
                zip((s.n for s in self.sequences), accumulate(counts, initial=0), strict=False)
            )

    def everything(self) -> None:
        run_units(self.request.kind, self, plan_units(self.request, self.sequences, BLOCKS))

    def slabs(self, unit: Unit) -> list[Slab]:
        return unit.slabs

    def begin(self, unit: Unit) -> Array:
        """The states of the unit's sequences, ``[sequences, H, G, K, V]``: they are scanned in lock step."""
        S = self.xp.stack([self.final[s.n, unit.value_heads, ...] for s in unit.sequences], axis=0)
        H = unit.heads.stop - unit.heads.start
        return self.xp.reshape(S, (S.shape[0], H, -1, *S.shape[2:]))

    def end(self, unit: Unit, S: Array) -> None:
        self._put_away(unit, S, 0)

    def _put_away(self, unit: Unit, S: Array, running: int) -> Array:
        """Puts away the states of the sequences that end here; returns those of the ``running`` first."""
        count = S.shape[0]
        for i, s in enumerate(unit.sequences[running:count], start=running):
            state = self.xp.reshape(S[i, ...], (-1, *S.shape[-2:]))
            self.final = put(self.final, (s.n, unit.value_heads), state)
        return S if count == running else self.xp.asarray(S[:running, ...], copy=True)

    def prepare(self, unit: Unit, slab: Slab) -> Prepared:
        x = slab_tokens(self.request, self.flat, unit, slab)
        intra = interact(x.kq, -x.beta * x.kq[KEYS], x.decay, self.base)
        # Solved for here, not in the scan, which all else waits for.
        start = put(intra.start, KEYS, intra.inverse @ intra.start[KEYS])
        return Prepared(intra.inverse @ x.v, intra._replace(start=start))

    def scan(self, unit: Unit, slab: Slab, prepared: Prepared, S: Array) -> tuple[Scanned, Array]:
        xp = self.xp
        u, intra = prepared
        n, H, G, C, V = u.shape
        starts = xp.reshape(intra.start, (n, H, G, 2 * C, -1))
        ends = xp.matrix_transpose(intra.end)
        total = intra.total[..., None]
        where = {"dtype": self.flat.dtype, "device": beside(u)}
        reads, errors = (xp.empty((n, H, G, rows, V), **where) for rows in (2 * C, C))
        for chunk, blocks in slab.steps:
            count = blocks.stop - blocks.start
            if count < S.shape[0]:
                S = self._put_away(unit, S, count)
            if self.keep or self.request.checkpoint_every:
                self._record(unit, slab, chunk, blocks, S)
            reads = store(reads, blocks, xp.matmul, starts[blocks, ...], S)
            errors = store(errors, blocks, xp.add, u[blocks, ...], reads[blocks, ..., 0::2, :])
            S *= total[blocks, ...]
            S += ends[blocks, ...] @ errors[blocks, ...]
        return Scanned(intra, reads, errors), S

    def finish(self, unit: Unit, slab: Slab, scanned: Scanned) -> None:
        intra, reads, errors = scanned
        o = intra.qk @ errors
        n, H, G, _, V = o.shape
        by_head = (n, H * G, -1, V)
        read = self.xp.reshape(reads, by_head)[..., 1::2, :]
        self.o = scatter_sum(self.o, slab, unit.value_heads, self.xp.reshape(o, by_head), read)
        if self.keep:
            self._keep(unit, slab, errors, intra)

    def _record(self, unit: Unit, slab: Slab, chunk: int, blocks: slice, S: Array) -> None:
        """Keeps the states at a chunk's start: for the backward, and as checkpoints where a block starts."""
        every = self.request.checkpoint_every // CHUNK
        states = self.xp.reshape(S, (S.shape[0], -1, *S.shape[3:]))
        if self.keep:
            where = (index(slab.slots_of(blocks), S), unit.value_heads)
            self.saved = self.saved._replace(states=put(self.saved.states, where, states))
        if every and chunk % every == 0:
            rows = [self.first_block[s.n] + chunk // every for s in unit.sequences[: S.shape[0]]]
            self.blocks = put(self.blocks, (index_array(rows, S), unit.value_heads), states)

    def _keep(self, unit: Unit, slab: Slab, errors: Array, intra: Intra) -> None:
        where = (index(slab.slots, errors), unit.value_heads)

        def kept(target: Array, values: Array) -> Array:
            n, H, G, *tail = values.shape
            return put(target, where, self.xp.reshape(values, (n, H * G, *tail)))

        self.saved = self.saved._replace(
            errors=kept(self.saved.errors, errors),
            inverses=kept(self.saved.inverses, intra.inverse),
            qks=kept(self.saved.qks, intra.qk),
        )

    def _state_dtype(self) -> Any:
        given = self.inputs.initial_state
        return getattr(self.xp, self.request.state_dtype) if given is None else given.dtype

    def final_state(self) -> Array:
        return cast(state_layout(self.final, self.request), self._state_dtype())

    def checkpoints(self) -> Array:
        blocks = self.xp.reshape(state_layout(self.blocks, self.request), self.request.checkpoint_shape)
        return cast(blocks, self._state_dtype())


def start_states(request: Request, inputs: Any, flat: Flat) -> Array:
    """A fresh ``[N, HV, K, V]`` in the compute dtype, to be written to."""
    xp = namespace(inputs.q)
    shape = (request.N, request.HV, request.K, request.V)
    state = xp.zeros(shape, dtype=flat.dtype, device=beside(inputs.q))
    if inputs.initial_state is None:
        return state
    given = cast(inputs.initial_state, flat.dtype)
    return put(state, (...,), state_layout(given, request))


def state_layout(state: Array, request: Request) -> Array:
    """``[.., K, V]`` to the caller's layout, or back."""
    return namespace(state).matrix_transpose(state) if request.state_v_first else state
