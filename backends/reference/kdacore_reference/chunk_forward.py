"""``chunk_kda`` and ``chunk_gated_delta_rule`` forward: chunks in parallel, then a short scan over
them.

Rows are the negated keys and the queries times the scale, columns the keys times beta. With ``P``
the decayed products of key rows with the columns before them and ``qk`` those of query rows, a
chunk that starts from state ``S`` computes

    errors = (I - P)^-1 (v + key_start S)        what each token has to correct
    o      = query_start S + qk errors
    S'     = total S + end^T errors

where the rows in ``key_start`` and ``query_start`` carry the decay from the chunk's start, the
columns in ``end`` that to its end.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from kdacore.types import Array, ChunkInputs, Outputs, Request
from kdacore_reference.arrays import (
    cast,
    compute_dtype,
    device_of,
    index_array,
    namespace,
    plain,
    put,
    state_dtype,
    state_layout,
    store,
    without_float_errors,
    write_rows,
)
from kdacore_reference.gate import base_rows, beta_forward, gate_forward, gate_parameters, qk_l2norm_scale
from kdacore_reference.intra import KEYS, QUERIES, Intra, interact
from kdacore_reference.slabs import (
    CHUNK,
    Slab,
    Unit,
    chunk_count,
    flat_rows,
    gaps_between,
    gather,
    index,
    last_row,
    mask_of,
    masked,
    plan_units,
    result_rows,
    run_units,
    scatter_sum,
    sequences_of,
    write_output,
    zero_rows,
)

if TYPE_CHECKING:
    from kdacore_reference.checkpoints import PoolCheckpoints

BLOCKS = 64
"""Chunks times value heads in a slab: small enough for the cache, large enough to amortise the cost
of a call."""


class Flat(NamedTuple):
    """The caller's arrays with batch and tokens as one axis of rows, and the gate's parameters per
    head."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    """After its sigmoid, in the compute dtype."""
    a: Array | None
    """``exp(A_log)`` as ``[HV, 1, 1]``."""
    bias: Array | None
    """``dt_bias`` as ``[HV, 1, K or 1]``."""
    dtype: Any
    """The compute dtype."""


def flatten(request: Request, inputs: Any, gaps: list[slice]) -> Flat:
    """``gaps``: rows that are not read."""
    xp = namespace(inputs.q)
    dtype = compute_dtype(xp, request)
    a, bias = gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype)
    tail = (request.HV, 1, -1)
    return Flat(
        q=flat_rows(inputs.q),
        k=flat_rows(inputs.k),
        v=flat_rows(inputs.v),
        g=flat_rows(inputs.g),
        beta=beta_forward(beta_rows(inputs.beta, dtype, gaps), request),
        a=None if a is None else xp.reshape(a, tail),
        bias=None if bias is None else xp.reshape(bias, tail),
        dtype=dtype,
    )


def beta_rows(beta: Array, dtype: Any, gaps: list[slice]) -> Array:
    """``beta`` as ``[B*T, HV]`` in ``dtype``, with zeros in rows that are not read: they may hold
    anything."""
    flat = cast(flat_rows(beta), dtype)
    return zero_rows(namespace(flat).asarray(flat, copy=True), gaps) if gaps else flat


class Tokens(NamedTuple):
    """One slab: ``n`` blocks of ``C`` tokens, ``H`` query/key heads of the unit, ``G`` value heads
    for each."""

    kq: Array
    """``[n, H, 1, C, 2, K]``: negated keys (0) and queries times the scale (1), normalised when
    asked.

    What the keys read from a state is subtracted from ``v``, what the queries read is the output.
    """
    v: Array
    """``[n, H, G, C, V]``; perhaps the caller's memory."""
    beta: Array
    """``[n, H, G, C, 1]``; 0 at padding."""
    decay: Array
    """``[n, H, G, C, K]``, or ``[n, H, G, C, 1]`` with a scalar gate; 1 at padding."""
    kq_scale: Array
    """What keys and queries were multiplied by: -1 and the scale, over their norms with l2norm;
    ``[n, H, C, 2, 1]`` or ``[2, 1]``."""
    log_decay: Array
    """``[n, HV, C, K or 1]``; 0 at padding."""
    raw_g: Array
    """``g`` as the caller gave it, for the backward; perhaps the caller's memory."""


def slab_tokens(request: Request, flat: Flat, unit: Unit, slab: Slab) -> Tokens:
    """Gather, widen, normalise and gate one slab.

    Heads stay inside tokens in memory, as the caller has them: a factor that is the same for
    several tokens then applies to runs of ``heads * K`` elements.
    """
    xp = namespace(flat.q)
    H, G = unit.heads.stop - unit.heads.start, request.HV // request.H
    mask = mask_of(slab, flat.q)
    # The caller's dtype is widened once the rows are gathered; half precision never enters
    # arithmetic.
    kq = xp.empty((slab.blocks, CHUNK, 2, H, request.K), dtype=flat.dtype, device=device_of(flat.q))
    kq = xp.permute_dims(kq, (0, 3, 1, 2, 4))
    k, q = (gather(x, slab, unit.heads, flat.dtype) for x in (flat.k, flat.q))
    kq_scale = key_and_query(-1.0, request.scale, kq)
    if request.qk_l2norm:
        kq_scale = xp.stack([qk_l2norm_scale(k), qk_l2norm_scale(q)], axis=-2) * kq_scale
    kq = store(kq, KEYS, xp.multiply, k, kq_scale[KEYS])
    kq = store(kq, QUERIES, xp.multiply, q, kq_scale[QUERIES])

    def grouped(array: Array) -> Array:
        return xp.reshape(array, (slab.blocks, H, G, CHUNK, -1))

    g = flat.g[..., None] if request.scalar_gate else flat.g
    raw_g = gather(g, slab, unit.value_heads, flat.dtype)
    log_decay = masked(gate_forward(request, raw_g, *gate_slices(flat, unit)), mask)
    return Tokens(
        kq=kq[:, :, None, ...],
        v=grouped(gather(flat.v, slab, unit.value_heads, flat.dtype)),
        beta=grouped(gather(flat.beta[..., None], slab, unit.value_heads, flat.dtype, mask)),
        decay=grouped(xp.exp(log_decay)),
        kq_scale=kq_scale,
        log_decay=log_decay,
        raw_g=raw_g,
    )


def key_and_query(key: float, query: float, like: Array) -> Array:
    """A factor for keys and one for queries, ``[2, 1]``."""
    return namespace(like).asarray([[key], [query]], dtype=like.dtype, device=device_of(like))


def gate_slices(flat: Flat, unit: Unit) -> tuple[Array | None, Array | None]:
    """``exp(A_log)`` and ``dt_bias`` of the unit's value heads, to broadcast over
    ``[n, HV, C, K]``."""
    a = None if flat.a is None else flat.a[unit.value_heads, ...]
    return a, None if flat.bias is None else flat.bias[unit.value_heads, ...]


class Saved(NamedTuple):
    """Arrays saved for the backward, for every chunk of every sequence, in the compute dtype."""

    states: Array
    """``[chunks, HV, K, V]``: at each chunk's start."""
    errors: Array
    """``[chunks, HV, C, V]``: what each token had to correct."""
    inverses: Array
    qks: Array
    """``[chunks, HV, C, C]``: of :class:`~kdacore_reference.intra.Intra`."""


@without_float_errors
def chunk_forward(request: Request, inputs: ChunkInputs) -> Outputs:
    """The forward of :class:`~kdacore.types.ChunkInputs`; ``saved`` is a :class:`Saved` when
    gradients are wanted."""
    run = ForwardRun(request, inputs, save=request.needs_grad)
    run.run()
    o = plain(run.xp.reshape(run.o, (request.B, request.T, request.HV, request.V)))
    o = cast(o, plain(inputs.v).dtype)
    checkpoints = run.checkpoints() if request.checkpoint_every else None
    final = run.final_state() if request.output_final_state and not request.inplace_state else None
    rows = run.pool_rows() if request.inplace_state else []
    # The caller's arrays are written last, with values that are there: what fails before has changed none.
    o = write_output(inputs, o, last_row(request, run.given))
    if request.inplace_state:
        pool = run.write_pool(rows)
        final = pool if request.output_final_state else None
    return Outputs(
        o=o, final_state=final, checkpoints=checkpoints, saved=tuple(run.saved) if run.save else ()
    )


def chunk_saved(request: Request, inputs: ChunkInputs) -> Saved:
    """What ``chunk_forward`` saves for a call that wants gradients, computed again."""
    run = ForwardRun(replace(request, checkpoint_every=0), inputs, save=True)
    run.run()
    return run.saved


class Prepared(NamedTuple):
    """A slab before its states are known."""

    u: Array
    """``[n, H, G, C, V]``: ``errors`` from a state of zeros."""
    intra: Intra
    """The chunk's interactions with the key rows of ``start`` solved for: what these rows read is
    added to ``u``."""


class Scanned(NamedTuple):
    """A slab once its states are known."""

    intra: Intra
    reads: Array
    """``[n, H, G, 2 C, V]``: of keys and queries in turn."""
    errors: Array
    """``[n, H, G, C, V]``."""


class ForwardRun:
    """One forward call: collects the results while its units run."""

    def __init__(self, request: Request, inputs: ChunkInputs, save: bool) -> None:
        self.request, self.inputs = request, inputs
        xp = self.xp = namespace(inputs.q)
        self.given = sequences_of(request, inputs)
        self.sequences, starts = self.given, None
        if request.inplace_state or request.pool_size or request.has("has_initial_state"):
            from kdacore_reference import states  # here: a call for training does without

            self.rows = states.checked_state_rows(request, inputs, self.given)
            self.sequences = states.with_slots(self.given, self.rows)
            starts = self.rows.read
        gaps = gaps_between(request, self.sequences)
        self.flat = flatten(request, inputs, gaps)
        self.o = result_rows(request, plain(inputs.v), request.HV, request.V, gaps)
        self.final = start_states(request, inputs, self.flat.dtype, starts)
        self.pool_checkpoints: PoolCheckpoints | None = None
        if request.checkpoint_count:
            from kdacore_reference import checkpoints  # here: few calls need it

            dtype = self.flat.dtype
            self.pool_checkpoints = checkpoints.PoolCheckpoints(request, inputs, self.given, self.rows, dtype)
        where = {"dtype": self.flat.dtype, "device": device_of(inputs.q)}
        self.save = save
        self.base = base_rows(request)
        lead = (sum(chunk_count(s) for s in self.sequences) if save else 0, request.HV)
        tails = ((request.K, request.V), (CHUNK, request.V), (CHUNK, CHUNK), (CHUNK, CHUNK))
        self.saved = Saved(*(xp.empty((*lead, *tail), **where) for tail in tails))
        if request.checkpoint_every:
            rows = math.prod(request.checkpoint_shape[:-3])
            self.checkpoint_rows = xp.zeros((rows, request.HV, request.K, request.V), **where)
            counts = [-(-s.length // request.checkpoint_every) for s in self.given]
            self.first_block = dict(
                zip((s.n for s in self.given), accumulate(counts, initial=0), strict=False)
            )

    def run(self) -> None:
        run_units(self.request.kind, self, plan_units(self.request, self.sequences, BLOCKS))

    def slabs(self, unit: Unit) -> list[Slab]:
        return unit.slabs

    def begin(self, unit: Unit) -> Array:
        """The states of the unit's sequences, ``[sequences, H, G, K, V]``: they are scanned in
        step."""
        S = self.xp.stack([self.final[s.n, unit.value_heads, ...] for s in unit.sequences], axis=0)
        H = unit.heads.stop - unit.heads.start
        return self.xp.reshape(S, (S.shape[0], H, -1, *S.shape[2:]))

    def end(self, unit: Unit, S: Array) -> None:
        self._store_finished(unit, S, 0)

    def _store_finished(self, unit: Unit, S: Array, running: int) -> Array:
        """Store the final states of the sequences that end here; return those of the first
        ``running``."""
        count = S.shape[0]
        for i, s in enumerate(unit.sequences[running:count], start=running):
            state = self.xp.reshape(S[i, ...], (-1, *S.shape[-2:]))
            self.final = put(self.final, (s.n, unit.value_heads), state)
        return S if count == running else self.xp.asarray(S[:running, ...], copy=True)

    def prepare(self, unit: Unit, slab: Slab) -> Prepared:
        x = slab_tokens(self.request, self.flat, unit, slab)
        intra = interact(x.kq, -x.beta * x.kq[KEYS], x.decay, self.base)
        # Solved here rather than in the scan, because everything else waits for the scan.
        start = put(intra.start, KEYS, intra.inverse @ intra.start[KEYS])
        return Prepared(intra.inverse @ x.v, intra._replace(start=start))

    def scan(self, unit: Unit, slab: Slab, prepared: Prepared, S: Array) -> tuple[Scanned, Array]:
        xp = self.xp
        u, intra = prepared
        n, H, G, C, V = u.shape
        starts = xp.reshape(intra.start, (n, H, G, 2 * C, -1))
        ends = xp.matrix_transpose(intra.end)
        total = intra.total[..., None]
        where = {"dtype": self.flat.dtype, "device": device_of(u)}
        reads, errors = (xp.empty((n, H, G, rows, V), **where) for rows in (2 * C, C))
        for chunk, blocks in slab.steps:
            count = blocks.stop - blocks.start
            if count < S.shape[0]:
                S = self._store_finished(unit, S, count)
            if self.save or self.request.checkpoint_every or self.pool_checkpoints:
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
        if self.save:
            self._save_slab(unit, slab, errors, intra)

    def _record(self, unit: Unit, slab: Slab, chunk: int, blocks: slice, S: Array) -> None:
        """Save the states at a chunk's start: for the backward, and as checkpoints where a
        checkpoint block starts or one for the pool is near."""
        every = self.request.checkpoint_every // CHUNK
        states = self.xp.reshape(S, (S.shape[0], -1, *S.shape[3:]))
        if self.save:
            where = (index(slab.slots_of(blocks), S), unit.value_heads)
            self.saved = self.saved._replace(states=put(self.saved.states, where, states))
        if every and chunk % every == 0:
            rows = [self.first_block[s.n] + chunk // every for s in unit.sequences[: S.shape[0]]]
            self.checkpoint_rows = put(self.checkpoint_rows, (index_array(rows, S), unit.value_heads), states)
        if self.pool_checkpoints:
            self.pool_checkpoints.record(unit, chunk, states)

    def _save_slab(self, unit: Unit, slab: Slab, errors: Array, intra: Intra) -> None:
        where = (index(slab.slots, errors), unit.value_heads)

        def saved(target: Array, values: Array) -> Array:
            n, H, G, *tail = values.shape
            return put(target, where, self.xp.reshape(values, (n, H * G, *tail)))

        self.saved = self.saved._replace(
            errors=saved(self.saved.errors, errors),
            inverses=saved(self.saved.inverses, intra.inverse),
            qks=saved(self.saved.qks, intra.qk),
        )

    def _state_dtype(self) -> Any:
        return state_dtype(self.request, self.inputs, self.xp)

    def pool_rows(self) -> list[tuple[Any, Array]]:
        """What the pool is to hold: the final states and the checkpoints at chosen tokens, each as
        row numbers and values as the pool has them."""
        from kdacore_reference.states import states_of_pool

        found = [(self.rows.final, states_of_pool(self.request, self.inputs, self.final))]
        if self.pool_checkpoints:
            states = self.pool_checkpoints.states()
            found.append((self.rows.checkpoints, states_of_pool(self.request, self.inputs, states)))
        return found

    def write_pool(self, rows: list[tuple[Any, Array]]) -> Array:
        """The caller's pool with these rows written; for JAX an updated one."""
        pool = getattr(self.inputs, self.request.written_pool)
        for numbers, states in rows:
            pool = write_rows(pool, numbers, states)
        return pool

    def final_state(self) -> Array:
        return cast(state_layout(self.final, self.request), self._state_dtype())

    def checkpoints(self) -> Array:
        blocks = self.xp.reshape(
            state_layout(self.checkpoint_rows, self.request), self.request.checkpoint_shape
        )
        return cast(blocks, self._state_dtype())


def start_states(request: Request, inputs: Any, dtype: Any, rows: Any | None) -> Array:
    """The states to start from as a new ``[N, HV, K, V]`` of ``dtype``, to be written to.

    ``rows``: of a pool, or None where ``initial_state`` has one state for each sequence.
    """
    if rows is not None:
        from kdacore_reference.states import read_states

        return read_states(request, inputs, rows, dtype)
    xp = namespace(inputs.q)
    shape = (request.N, request.HV, request.K, request.V)
    state = xp.zeros(shape, dtype=dtype, device=device_of(inputs.q))
    if inputs.initial_state is None:
        return state
    return put(state, (...,), state_layout(cast(inputs.initial_state, dtype), request))
