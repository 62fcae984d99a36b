"""``chunk_kda`` and ``chunk_gated_delta_rule`` backward: the adjoint of the forward, last chunk first.

The states at the chunks' starts are saved by the forward, or computed again; everything else of a slab is recomputed
from its tokens. Only the gradient of the state is carried from chunk to chunk.
"""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array, ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_reference.arrays import beside, cast, fold_sum, plain, put
from kdacore_reference.chunk_forward import chunk_states, state_layout
from kdacore_reference.gates import beta_backward, gate_backward, l2norm_backward
from kdacore_reference.intra import Intra, interact, interact_backward
from kdacore_reference.parallel import run_units
from kdacore_reference.plan import Slab, Unit, plan_units
from kdacore_reference.sequences import sequences_of
from kdacore_reference.tokens import (
    Tokens,
    empty_rows,
    flat_rows,
    flatten,
    gate_slices,
    gather,
    mask_of,
    masked,
    scatter,
    slab_tokens,
)

BLOCKS = 16
"""As in the forward; the backward holds about three times as much for each block."""


def chunk_backward(
    request: Request, inputs: ChunkInputs, saved: tuple[Array, ...], grads: OutputGrads
) -> InputGrads:
    """Gradients of every input of a chunked call, each shaped and typed like its input.

    Args:
        request: the forward's request.
        inputs: the forward's inputs.
        saved: what the forward saved, or ``()``.
        grads: gradients of ``o`` and ``final_state``; None where nothing flowed.
    """
    states = saved[0] if saved else chunk_states(request, inputs)
    run = BackwardRun(request, inputs, plain(states), grads)
    run_units(request.kind, run.unit, plan_units(request, run.sequences, BLOCKS))
    return run.results()


class SlabGrads(NamedTuple):
    """What flows through the scan of one slab, block after block."""

    read: Array
    """``[n, H, G, C, 2, V]``: of ``k_start S`` (0) and ``q_start S`` (1)."""
    wanted: Array
    """``[n, H, G, C, V]``: of ``beta (v - k_start S)``."""
    k_end: Array
    log_total: Array
    """``[n, H, G, K or 1]``."""


class BackwardRun:
    """One backward call: where gradients are collected while its units run."""

    def __init__(self, request: Request, inputs: ChunkInputs, states: Array, grads: OutputGrads) -> None:
        self.request, self.inputs, self.states = request, inputs, states
        xp = self.xp = array_namespace(inputs.q)
        self.flat = flat = flatten(request, inputs)
        self.sequences = sequences_of(request, inputs)
        self.do = None if grads.o is None else flat_rows(grads.o)
        self.dq = empty_rows(request, flat.q, request.H, request.K)
        self.dk = empty_rows(request, flat.k, request.H, request.K)
        self.dv = empty_rows(request, flat.v, request.HV, request.V)
        self.gate_width = 1 if request.scalar_gate else request.K
        self.dg = empty_rows(request, flat.g, request.HV, self.gate_width)
        self.dbeta = empty_rows(request, flat.beta, request.HV, 1)
        where = {"dtype": flat.dtype, "device": beside(inputs.q)}
        self.dstate = xp.zeros((request.N, request.HV, request.K, request.V), **where)
        if grads.final_state is not None:
            given = cast(grads.final_state, flat.dtype)
            self.dstate = put(self.dstate, (...,), state_layout(given, request))
        # Sums over tokens, kept apart by sequence so that their order depends on no other sequence.
        self.dA_log = xp.zeros((request.N, request.HV), **where)
        self.dbias = xp.zeros((request.N, request.HV, self.gate_width), **where)

    def unit(self, unit: Unit) -> None:
        """Scans the unit's sequences in lock step from their ends."""
        xp = self.xp
        H = unit.heads.stop - unit.heads.start
        dS = xp.stack([self.dstate[s.n, unit.value_heads, ...] for s in unit.sequences], axis=0)
        shape = dS.shape
        dS = xp.reshape(dS, (shape[0], H, -1, *shape[2:]))
        for slab in reversed(unit.slabs):
            dS = self._slab(unit, slab, dS)
        dS = xp.reshape(dS, shape)
        for i, s in enumerate(unit.sequences):
            self.dstate = put(self.dstate, (s.n, unit.value_heads), dS[i, ...])

    def _slab(self, unit: Unit, slab: Slab, dS: Array) -> Array:
        xp, request = self.xp, self.request
        x = slab_tokens(request, self.flat, unit, slab)
        intra = interact(x.kq, x.decay, x.beta, keep=True)
        n, H, G, C, V = x.v.shape
        K = request.K
        slots = xp.asarray(slab.slots, device=beside(x.v))
        S = xp.reshape(self.states[slots, unit.value_heads, ...], (n, H, G, K, V))
        starts = xp.reshape(intra.kq_start, (n, H, G, 2 * C, K))
        read_k = xp.reshape(starts @ S, (n, H, G, C, 2, V))[..., 0, :]
        error = x.v - read_k
        fresh = intra.inverse @ (x.beta * error)
        do = self._output_grad(unit, slab, (n, H, G, C, V))

        through, dS = self._scan(slab, x, intra, S, fresh, do, dS)
        flat_read = xp.reshape(through.read, (n, H, G, 2 * C, V))
        dstart = xp.reshape(flat_read @ xp.matrix_transpose(S), (n, H, G, C, 2, K))
        both = xp.reshape(xp.stack([-through.wanted, do], axis=-2), (n, H, G, 2 * C, V))
        dpairs = xp.reshape(both @ xp.matrix_transpose(fresh), (n, H, G, C, 2, C))
        dx = interact_backward(x.kq, x.decay, x.beta, intra, dstart, through.k_end, through.log_total, dpairs)
        dbeta = dx.beta + xp.sum(through.wanted * error, axis=-1, keepdims=True)
        self._store(unit, slab, x, dx.kq, -through.read[..., 0, :], dbeta, dx.log_decay)
        return dS

    def _output_grad(self, unit: Unit, slab: Slab, shape: tuple[int, ...]) -> Array:
        xp, flat = self.xp, self.flat
        if self.do is None:
            return xp.zeros(shape, dtype=flat.dtype, device=beside(flat.q))
        do = gather(self.do, slab, unit.value_heads, flat.dtype, mask_of(slab, self.do))
        return xp.reshape(do * self.request.scale, shape)

    def _scan(
        self, slab: Slab, x: Tokens, intra: Intra, S: Array, fresh: Array, do: Array, dS: Array
    ) -> tuple[SlabGrads, Array]:
        """Carries the gradient of the state from the slab's last chunk to its first."""
        xp = self.xp
        n, H, G, C, V = x.v.shape
        starts = xp.reshape(intra.kq_start, (n, H, G, 2 * C, -1))
        dfresh_here = xp.matrix_transpose(intra.qk) @ do
        reads, wanteds, ends, totals = [], [], [], []
        for _, blocks in reversed(list(slab.steps)):
            count = blocks.stop - blocks.start
            now = dS[:count, ...]
            dfresh = dfresh_here[blocks, ...] + intra.k_end[blocks, ...] @ now
            dwanted = xp.matrix_transpose(intra.inverse[blocks, ...]) @ dfresh
            dread = xp.stack([-x.beta[blocks, ...] * dwanted, do[blocks, ...]], axis=-2)
            ends.append(fresh[blocks, ...] @ xp.matrix_transpose(now))
            total = intra.total[blocks, ...]
            kept = total[..., None] * now
            log_total = xp.sum(kept * S[blocks, ...], axis=-1)
            if total.shape[-1] == 1:
                log_total = xp.sum(log_total, axis=-1, keepdims=True)
            totals.append(log_total)
            flat = xp.reshape(dread, (count, H, G, 2 * C, V))
            dS = put(dS, (slice(0, count),), kept + xp.matrix_transpose(starts[blocks, ...]) @ flat)
            reads.append(dread)
            wanteds.append(dwanted)
        grads = SlabGrads(*(xp.concat(part[::-1], axis=0) for part in (reads, wanteds, ends, totals)))
        return grads, dS

    def _store(
        self, unit: Unit, slab: Slab, x: Tokens, dkq: Array, dv: Array, dbeta: Array, dlog: Array
    ) -> None:
        """From the recurrence's inputs back to the caller's, into the rows of this slab."""
        xp, request = self.xp, self.request
        n, H, G, C, V = x.v.shape
        dk, dq = dkq[..., 0, :], dkq[..., 1, :]
        if x.k_scale is not None and x.q_scale is not None:
            kq = x.kq[:, :, 0, ...]
            dk = l2norm_backward(kq[..., 0, :], x.k_scale, dk)
            dq = l2norm_backward(kq[..., 1, :], x.q_scale, dq)
        self.dk = scatter(self.dk, slab, unit.heads, dk)
        self.dq = scatter(self.dq, slab, unit.heads, dq)
        self.dv = scatter(self.dv, slab, unit.value_heads, xp.reshape(dv, (n, H * G, C, V)))
        dbeta = beta_backward(x.raw_beta, xp.reshape(dbeta, (n, H * G, C, 1)), request)
        self.dbeta = scatter(self.dbeta, slab, unit.value_heads, dbeta)
        mask = mask_of(slab, dlog)
        dlog = masked(xp.reshape(dlog, (n, H * G, C, self.gate_width)), mask)
        dg, dA = gate_backward(request, x.raw_g, *gate_slices(self.flat, unit), dlog)
        self.dg = scatter(self.dg, slab, unit.value_heads, dg)
        if self.inputs.A_log is not None and dA is not None:
            self.dA_log = self._accumulate(self.dA_log, unit, slab, xp.sum(xp.sum(dA, axis=-1), axis=-1))
        if self.inputs.dt_bias is not None:
            self.dbias = self._accumulate(self.dbias, unit, slab, xp.sum(dg, axis=-2))

    def _accumulate(self, total: Array, unit: Unit, slab: Slab, parts: Array) -> Array:
        """Adds each block's part to its sequence's sum, last chunk first: later tokens only put zeros in front."""
        for _, blocks in reversed(list(slab.steps)):
            for i in range(blocks.start, blocks.stop):
                where = (unit.sequences[i - blocks.start].n, unit.value_heads)
                total = put(total, where, total[where] + parts[i, ...])
        return total

    def results(self) -> InputGrads:
        request, inputs, xp = self.request, self.inputs, self.xp

        def like(grad: Array, given: Array) -> Array:
            return xp.reshape(cast(grad, given.dtype), given.shape)

        A_log, bias, state = inputs.A_log, inputs.dt_bias, inputs.initial_state
        return InputGrads(
            q=like(self.dq, inputs.q),
            k=like(self.dk, inputs.k),
            v=like(self.dv, inputs.v),
            g=like(self.dg, inputs.g),
            beta=like(self.dbeta, inputs.beta),
            A_log=None if A_log is None else like(fold_sum(self.dA_log), A_log),
            dt_bias=None if bias is None else like(fold_sum(self.dbias), bias),
            initial_state=None if state is None else like(state_layout(self.dstate, request), state),
        )
