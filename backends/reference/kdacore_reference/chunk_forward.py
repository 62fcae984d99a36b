"""``chunk_kda`` and ``chunk_gated_delta_rule`` forward: chunks in parallel, then a short scan over them.

With ``P = tril(k k^T, -1)`` decayed, a chunk that starts from state ``S`` computes

    fresh = beta (I + P beta)^-1 (v - k_start S)        the values the delta rule really writes
    o     = scale (q_start S + qk fresh)
    S'    = total S + k_end^T fresh

where ``k_start``, ``q_start`` and ``k_end`` carry the decay from the chunk's start or to its end.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from kdacore.types import Array, ChunkInputs, Outputs, Request
from kdacore_reference.arrays import beside, cast, plain, put
from kdacore_reference.intra import interact
from kdacore_reference.parallel import run_units
from kdacore_reference.plan import CHUNK, Slab, Unit, chunk_count, plan_units
from kdacore_reference.sequences import sequences_of
from kdacore_reference.tokens import Flat, empty_rows, flatten, index, scatter, slab_tokens

BLOCKS = 64
"""Chunks times value heads in a slab: small enough for the cache, large enough to hide the cost of a call."""


def chunk_forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """The forward of :class:`~kdacore.types.ChunkInputs`.

    Returns:
        ``saved`` holds the state at the start of every chunk when gradients are wanted.
    """
    run = ForwardRun(request, inputs, want_states=request.needs_grad or bool(request.checkpoint_every))
    run.everything()
    o = run.xp.reshape(run.o, (request.B, request.T, request.HV, request.V))
    return Outputs(
        o=o,
        final_state=run.final_state() if request.output_final_state else None,
        checkpoints=run.checkpoints() if request.checkpoint_every else None,
        saved=(run.states,) if request.needs_grad else (),
    )


def chunk_states(request: Request, inputs: ChunkInputs) -> Array:
    """The state at the start of every chunk, ``[chunks, HV, K, V]``, as ``chunk_forward`` saves it."""
    run = ForwardRun(request, inputs, want_states=True)
    run.everything()
    return run.states


class ForwardRun:
    """One forward call: where results are collected while its units run."""

    def __init__(self, request: Request, inputs: ChunkInputs, want_states: bool) -> None:
        self.request, self.inputs = request, inputs
        self.xp = array_namespace(inputs.q)
        self.flat = flatten(request, inputs)
        self.sequences = sequences_of(request, inputs)
        self.o = empty_rows(request, plain(inputs.v), request.HV, request.V)
        self.final = start_states(request, inputs, self.flat)
        chunks = sum(chunk_count(s) for s in self.sequences) if want_states else 0
        self.states = self.xp.zeros(
            (chunks, *self.final.shape[1:]), dtype=self.flat.dtype, device=beside(inputs.q)
        )
        self.want_states = want_states

    def everything(self) -> None:
        units = plan_units(self.request, self.sequences, BLOCKS)
        run_units(self.request.kind, self.unit, units)

    def unit(self, unit: Unit) -> None:
        """Scans the unit's sequences in lock step, slab after slab."""
        S = self.xp.stack([self.final[s.n, unit.value_heads, ...] for s in unit.sequences], axis=0)
        H = unit.heads.stop - unit.heads.start
        S = self.xp.reshape(S, (S.shape[0], H, -1, *S.shape[2:]))
        for slab in unit.slabs:
            S = self._slab(unit, slab, S)
        self._finish(unit, S, 0)

    def _finish(self, unit: Unit, S: Array, running: int) -> Array:
        """Puts away the states of the sequences that end here; returns those of the ``running`` first."""
        count = S.shape[0]
        for i, s in enumerate(unit.sequences[running:count], start=running):
            state = self.xp.reshape(S[i, ...], (-1, *S.shape[-2:]))
            self.final = put(self.final, (s.n, unit.value_heads), state)
        return S if count == running else self.xp.asarray(S[:running, ...], copy=True)

    def _slab(self, unit: Unit, slab: Slab, S: Array) -> Array:
        xp, request = self.xp, self.request
        x = slab_tokens(request, self.flat, unit, slab, heads_inside=True)
        intra = interact(x.kq, x.decay, x.beta)
        n, H, G, C, V = x.v.shape
        starts = xp.reshape(intra.kq_start, (n, H, G, 2 * C, request.K))
        ends = xp.matrix_transpose(intra.k_end)
        total = intra.total[..., None]
        outputs = []
        for _, blocks in slab.steps:
            count = blocks.stop - blocks.start
            S = self._finish(unit, S, count)
            if self.want_states:
                where = (index(slab.slots_of(blocks), S), unit.value_heads)
                self.states = put(self.states, where, xp.reshape(S, (count, H * G, *S.shape[3:])))
            read = xp.reshape(starts[blocks, ...] @ S, (count, H, G, C, 2, V))
            beta = x.beta[blocks, ...]
            fresh = x.v[blocks, ...] - read[..., 0, :]
            fresh -= intra.coupling[blocks, ...] @ (beta * fresh)
            fresh *= beta
            o = intra.qk[blocks, ...] @ fresh
            o += read[..., 1, :]
            outputs.append(o)
            S *= total[blocks, ...]
            S += ends[blocks, ...] @ fresh
        o = xp.reshape(xp.concat(outputs, axis=0), (n, H * G, C, V))
        o *= request.scale
        self.o = scatter(self.o, slab, unit.value_heads, o)
        return S

    def final_state(self) -> Array:
        given = self.inputs.initial_state
        dtype = getattr(self.xp, self.request.state_dtype) if given is None else given.dtype
        return cast(state_layout(self.final, self.request), dtype)

    def checkpoints(self) -> Array:
        """The saved chunk states that start a block of ``checkpoint_every`` tokens."""
        request, xp = self.request, self.xp
        picked, first = [], 0
        for s in self.sequences:
            picked += list(range(first, first + chunk_count(s), request.checkpoint_every // CHUNK))
            first += chunk_count(s)
        shape = request.checkpoint_shape
        rows = 1
        for size in shape[:-3]:
            rows *= size
        out = xp.zeros((rows, *self.final.shape[1:]), dtype=self.flat.dtype, device=beside(self.final))
        if picked:
            chosen = self.states[xp.asarray(picked, device=beside(out)), ...]
            out = put(out, (slice(0, len(picked)),), chosen)
        given = self.inputs.initial_state
        dtype = getattr(xp, request.state_dtype) if given is None else given.dtype
        return xp.reshape(cast(state_layout(out, request), dtype), shape)


def start_states(request: Request, inputs: Any, flat: Flat) -> Array:
    """A fresh ``[N, HV, K, V]`` in the compute dtype, to be written to."""
    xp = array_namespace(inputs.q)
    shape = (request.N, request.HV, request.K, request.V)
    state = xp.zeros(shape, dtype=flat.dtype, device=beside(inputs.q))
    if inputs.initial_state is None:
        return state
    given = cast(inputs.initial_state, flat.dtype)
    return put(state, (...,), state_layout(given, request))


def state_layout(state: Array, request: Request) -> Array:
    """``[.., K, V]`` to the caller's layout, or back."""
    return array_namespace(state).matrix_transpose(state) if request.state_v_first else state
