"""``chunk_kda`` and ``chunk_gated_delta_rule`` backward: the adjoint of the forward, last chunk
first.

The states at the chunks' starts are saved by the forward, or computed again; everything else of a
slab is recomputed from its tokens. Only the gradient of the state is carried from chunk to chunk.
"""

from __future__ import annotations

from typing import NamedTuple

from kdacore.types import Array, ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_reference.arrays import (
    add_at,
    cast,
    device_of,
    fold_sum,
    namespace,
    overflow_to_inf,
    plain,
    put,
    state_layout,
    store,
    without_float_errors,
)
from kdacore_reference.chunk_forward import (
    BLOCKS,
    Saved,
    Tokens,
    beta_rows,
    chunk_saved,
    flatten,
    gate_slices,
    key_and_query,
    slab_tokens,
)
from kdacore_reference.gate import (
    SHRINK,
    base_rows,
    beta_backward,
    gate_backward,
    held_as,
    qk_l2norm_backward,
)
from kdacore_reference.intra import KEYS, QUERIES, Carried, carry_decays
from kdacore_reference.intra_backward import IntraGrads, interact_backward
from kdacore_reference.slabs import (
    Slab,
    Unit,
    flat_rows,
    gaps_between,
    gather,
    index,
    mask_of,
    masked,
    plan_units,
    result_rows,
    run_units,
    scatter,
    sequences_of,
)


@without_float_errors
def chunk_backward(
    request: Request, inputs: ChunkInputs, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """Gradients of every input of a chunked call, each shaped and typed like its input.

    Args:
        request: the forward's request.
        inputs: the forward's inputs.
        saved: what the forward saved, or ``()``.
        grads: gradients of ``o`` and ``final_state``; None for no gradient.
    """
    run = BackwardRun(request, inputs, Saved(*saved) if saved else chunk_saved(request, inputs), grads)
    run_units(request.kind, run, run.units)
    return run.results()


class Prepared(NamedTuple):
    """A slab before the gradients of its states are known."""

    x: Tokens
    carried: Carried
    saved: Saved
    do: Array
    """``[n, H, G, C, V]``."""
    derrors: Array
    """Gradient of ``errors`` from the outputs of the same chunk, laid out as ``do``."""


class Scanned(NamedTuple):
    """A slab once they are known."""

    prepared: Prepared
    dread: Array
    """``[n, H, G, C, 2, V]``: of what key rows (0) and query rows (1) read; the former is that of
    ``v``."""
    dend: Array
    log_total: Array
    """``[n, H, G, K or 1]``."""


class BackwardRun:
    """One backward call: collects the gradients while its units run."""

    def __init__(self, request: Request, inputs: ChunkInputs, saved: Saved, grads: OutputGrads) -> None:
        self.request, self.inputs = request, inputs
        self.saved = Saved(*(plain(x) for x in saved))
        xp = self.xp = namespace(inputs.q)
        self.sequences = sequences_of(request, inputs)
        self.gaps = gaps_between(request, self.sequences)
        self.flat = flat = flatten(request, inputs, self.gaps)
        self.do = None if grads.o is None else flat_rows(grads.o)
        self.gate_width = 1 if request.scalar_gate else request.K

        def empty(like: Array, heads: int, width: int) -> Array:
            return result_rows(request, like, heads, width, self.gaps)

        self.dq = empty(flat.q, request.H, request.K)
        self.dk = empty(flat.k, request.H, request.K)
        self.dv = empty(flat.v, request.HV, request.V)
        self.dg = empty(flat.g, request.HV, self.gate_width)
        self.dbeta = empty(flat.beta, request.HV, 1)
        where = {"dtype": flat.dtype, "device": device_of(inputs.q)}
        self.dstate = xp.zeros((request.N, request.HV, request.K, request.V), **where)
        if grads.final_state is not None:
            given = cast(grads.final_state, flat.dtype)
            self.dstate = put(self.dstate, (...,), state_layout(given, request))
        self.units = plan_units(request, self.sequences, BLOCKS)
        # Sums over the tokens of each block of a slab, by unit and first chunk. They are added in a
        # fixed order.
        self.dA_parts: dict[tuple[int, int], Array] = {}
        self.dbias_parts: dict[tuple[int, int], Array] = {}

    def slabs(self, unit: Unit) -> list[Slab]:
        """The last slab first."""
        return unit.slabs[::-1]

    def begin(self, unit: Unit) -> Array:
        H, G = unit.heads.stop - unit.heads.start, self.request.HV // self.request.H
        where = {"dtype": self.flat.dtype, "device": device_of(self.flat.q)}
        return self.xp.zeros((0, H, G, self.request.K, self.request.V), **where)

    def end(self, unit: Unit, dS: Array) -> None:
        for i, s in enumerate(unit.sequences[: dS.shape[0]]):
            state = self.xp.reshape(dS[i, ...], (-1, *dS.shape[3:]))
            self.dstate = put(self.dstate, (s.n, unit.value_heads), state)

    def _join(self, unit: Unit, dS: Array, count: int) -> Array:
        """Add the sequences that end at this chunk: the first ``count`` are now active."""
        waiting = unit.sequences[dS.shape[0] : count]
        if not waiting:
            return dS
        more = [self.xp.reshape(self.dstate[s.n, unit.value_heads, ...], dS.shape[1:]) for s in waiting]
        return self.xp.concat([dS, self.xp.stack(more, axis=0)], axis=0)

    def prepare(self, unit: Unit, slab: Slab) -> Prepared:
        x = slab_tokens(self.request, self.flat, unit, slab)
        carried = carry_decays(x.kq, -x.beta * x.kq[KEYS], x.decay, base_rows(self.request))
        n, H, G, C, V = x.v.shape
        saved = self._saved_of(unit, slab, (n, H, G))
        do = self._output_grad(unit, slab, (n, H, G, C, V))
        return Prepared(x, carried, saved, do, self.xp.matrix_transpose(saved.qks) @ do)

    def _saved_of(self, unit: Unit, slab: Slab, lead: tuple[int, int, int]) -> Saved:
        """The slab's part of what was saved, its heads as ``[n, H, G]``."""
        xp = self.xp
        slots = index(slab.slots, self.saved.states)
        parts = (whole[slots, ...][:, unit.value_heads, ...] for whole in self.saved)
        return Saved(*(xp.reshape(part, (*lead, *part.shape[2:])) for part in parts))

    def _output_grad(self, unit: Unit, slab: Slab, shape: tuple[int, ...]) -> Array:
        xp, flat = self.xp, self.flat
        if self.do is None:
            return xp.zeros(shape, dtype=flat.dtype, device=device_of(flat.q))
        do = gather(self.do, slab, unit.value_heads, flat.dtype, mask_of(slab, self.do))
        return xp.reshape(do, shape)

    def scan(self, unit: Unit, slab: Slab, prepared: Prepared, dS: Array) -> tuple[Scanned, Array]:
        """Propagate the gradient of the state from the slab's last chunk to its first."""
        xp = self.xp
        _, carried, saved, do, derrors = prepared
        n, H, G, C, V = do.shape
        starts = xp.matrix_transpose(xp.reshape(carried.start, (n, H, G, 2 * C, -1)))
        solve = xp.matrix_transpose(saved.inverses)
        total = carried.total[..., None]
        dread = xp.empty((n, H, G, C, 2, V), dtype=do.dtype, device=device_of(do))
        dread = put(dread, QUERIES, do)
        dend, overlaps = xp.empty_like(carried.end), []
        for _, blocks in reversed(list(slab.steps)):
            count = blocks.stop - blocks.start
            if count > dS.shape[0]:
                dS = self._join(unit, dS, count)
            derror = derrors[blocks, ...]
            derror += carried.end[blocks, ...] @ dS
            dread = store(dread, (blocks, *KEYS), xp.matmul, solve[blocks, ...], derror)
            dend = store(dend, blocks, xp.matmul, saved.errors[blocks, ...], xp.matrix_transpose(dS))
            overlaps.append(xp.vecdot(dS, saved.states[blocks, ...]))
            dS *= total[blocks, ...]
            dS += starts[blocks, ...] @ xp.reshape(dread[blocks, ...], (count, H, G, 2 * C, V))
        log_total = carried.total * xp.concat(overlaps[::-1], axis=0)
        if self.request.scalar_gate:
            log_total = xp.sum(log_total, axis=-1, keepdims=True)
        return Scanned(prepared, dread, dend, log_total), dS

    def finish(self, unit: Unit, slab: Slab, scanned: Scanned) -> None:
        xp = self.xp
        (x, carried, saved, _, _), dread, dend, log_total = scanned
        n, H, G, C, V = x.v.shape
        flat_read = xp.reshape(dread, (n, H, G, 2 * C, V))
        dstart = xp.reshape(xp.empty_like(carried.start), (n, H, G, 2 * C, -1))
        dstart = store(dstart, ..., xp.matmul, flat_read, xp.matrix_transpose(saved.states))
        dstart = xp.reshape(dstart, (n, H, G, C, 2, -1))
        dpairs = xp.reshape(flat_read @ xp.matrix_transpose(saved.errors), (n, H, G, C, 2, C))
        dx = interact_backward(carried, x.decay, dstart, dend, log_total, dpairs)
        self._store(unit, slab, x, dx, dread[..., 0, :])

    def _store(self, unit: Unit, slab: Slab, x: Tokens, dx: IntraGrads, dv: Array) -> None:
        """Gradients of the caller's inputs from those of the recurrence's inputs, stored in the
        rows of this slab."""
        xp, request = self.xp, self.request
        n, H, G, C, V = x.v.shape
        # The columns are -beta times the key rows, and are multiplied with their own token's query
        # without decay.
        dcolumns = dx.columns + dx.diagonal * x.kq[QUERIES]
        dbeta = -xp.vecdot(x.kq[KEYS], dcolumns)
        dkq = dx.kq
        dkq = add_at(dkq, QUERIES, (-x.beta * dx.diagonal) * x.kq[KEYS])
        dkq = add_at(dkq, KEYS, -x.beta * dcolumns)
        dkq = dkq[:, :, 0, ...] if G == 1 else xp.sum(dkq, axis=2)
        if request.qk_l2norm:
            inverse_lengths = key_and_query(-1.0, 1.0 / request.scale if request.scale else 0.0, dkq)
            dkq = qk_l2norm_backward(x.kq[:, :, 0, ...], x.kq_scale, inverse_lengths, dkq)
        else:
            dkq *= x.kq_scale
        self.dk = scatter(self.dk, slab, unit.heads, dkq[KEYS])
        self.dq = scatter(self.dq, slab, unit.heads, dkq[QUERIES])
        self.dv = scatter(self.dv, slab, unit.value_heads, xp.reshape(dv, (n, H * G, C, V)))
        self.dbeta = scatter(self.dbeta, slab, unit.value_heads, xp.reshape(dbeta, (n, H * G, C, 1)))
        dlog = xp.reshape(dx.log_decay, (n, H * G, C, self.gate_width))
        dlog = masked(dlog, mask_of(slab, dlog))
        dg, dA = gate_backward(request, x.raw_g, *gate_slices(self.flat, unit), x.log_decay, dlog)
        self.dg = scatter(self.dg, slab, unit.value_heads, held_as(dg, self.dg.dtype))
        if self.inputs.A_log is not None and dA is not None:
            self.dA_parts[unit.number, slab.first_chunk] = xp.sum(xp.sum(dA, axis=-1), axis=-1)
        if self.inputs.dt_bias is not None:
            scaled = dg * SHRINK if self.request.gate == "sigmoid" else dg
            self.dbias_parts[unit.number, slab.first_chunk] = xp.sum(scaled, axis=-2)

    def _total(self, parts: dict[tuple[int, int], Array], width: tuple[int, ...]) -> Array:
        """The sum over sequences of the sums of their blocks' parts, last chunk first: later tokens
        then only prepend zeros."""
        request, flat = self.request, self.flat
        shape = (request.N, request.HV, *width)
        total = self.xp.zeros(shape, dtype=flat.dtype, device=device_of(self.inputs.q))
        for unit in self.units:
            for slab in self.slabs(unit):
                part = parts[unit.number, slab.first_chunk]
                for _, blocks in reversed(list(slab.steps)):
                    for i in range(blocks.start, blocks.stop):
                        where = (unit.sequences[i - blocks.start].n, unit.value_heads)
                        total = put(total, where, total[where] + part[i, ...])
        return fold_sum(total)

    def _bias_grad(self, bias: Array) -> Array:
        total = self._total(self.dbias_parts, (self.gate_width,))
        if self.request.gate == "sigmoid":
            with overflow_to_inf(total):
                total = total * (1.0 / SHRINK)
        return held_as(self.xp.reshape(total, bias.shape), bias.dtype)

    def results(self) -> InputGrads:
        request, inputs, xp = self.request, self.inputs, self.xp

        def like(grad: Array, given: Array) -> Array:
            return cast(xp.reshape(grad, given.shape), given.dtype)

        beta = beta_rows(inputs.beta, self.flat.dtype, self.gaps)
        dbeta = beta_backward(beta, self.dbeta[..., 0], request)
        A_log, bias, state = inputs.A_log, inputs.dt_bias, inputs.initial_state
        return InputGrads(
            q=like(self.dq, inputs.q),
            k=like(self.dk, inputs.k),
            v=like(self.dv, inputs.v),
            g=like(self.dg, inputs.g),
            beta=like(dbeta, inputs.beta),
            A_log=None if A_log is None else like(self._total(self.dA_parts, ()), A_log),
            dt_bias=None if bias is None else self._bias_grad(bias),
            initial_state=None if state is None else like(state_layout(self.dstate, request), state),
        )
