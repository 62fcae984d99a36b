"""``chunk_kda`` and ``chunk_gated_delta_rule`` backward: the adjoint of the forward, last chunk first.

The states at the chunks' starts are saved by the forward, or computed again; everything else of a slab is recomputed
from its tokens. Only the gradient of the state is carried from chunk to chunk.
"""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace

from kdacore.types import Array, ChunkInputs, InputGrads, OutputGrads, Request
from kdacore_reference.arrays import beside, cast, fold_sum, plain, put
from kdacore_reference.chunk_forward import Saved, chunk_saved, state_layout
from kdacore_reference.gates import beta_backward, gate_backward, l2norm_backward
from kdacore_reference.intra import Carried, carry_and_keep, solving
from kdacore_reference.intra_backward import IntraGrads, interact_backward
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
    index,
    mask_of,
    masked,
    scatter,
    slab_tokens,
)

BLOCKS = 32
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
    kept = Saved(*saved) if saved else chunk_saved(request, inputs)
    run = BackwardRun(request, inputs, kept, grads)
    run_units(request.kind, run.unit, plan_units(request, run.sequences, BLOCKS))
    return run.results()


class SlabGrads(NamedTuple):
    """What flows through the scan of one slab, block after block."""

    read: Array
    """``[n, H, G, C, 2, V]``: of ``k_start S`` (0) and ``q_start S`` (1)."""
    beta: Array
    """``[n, H, G, C]``."""
    k_end: Array
    log_total: Array
    """``[n, H, G, K or 1]``."""


class BackwardRun:
    """One backward call: where gradients are collected while its units run."""

    def __init__(self, request: Request, inputs: ChunkInputs, saved: Saved, grads: OutputGrads) -> None:
        self.request, self.inputs = request, inputs
        self.saved = Saved(*(plain(x) for x in saved))
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
        H = unit.heads.stop - unit.heads.start
        G = self.request.HV // self.request.H
        where = {"dtype": self.flat.dtype, "device": beside(self.flat.q)}
        dS = self.xp.zeros((0, H, G, self.request.K, self.request.V), **where)
        for slab in reversed(unit.slabs):
            dS = self._slab(unit, slab, dS)
        for i, s in enumerate(unit.sequences[: dS.shape[0]]):
            state = self.xp.reshape(dS[i, ...], (H * G, *dS.shape[3:]))
            self.dstate = put(self.dstate, (s.n, unit.value_heads), state)

    def _join(self, unit: Unit, dS: Array, count: int) -> Array:
        """With the sequences that end at this chunk: the first ``count`` now run."""
        waiting = unit.sequences[dS.shape[0] : count]
        if not waiting:
            return dS
        more = [self.xp.reshape(self.dstate[s.n, unit.value_heads, ...], dS.shape[1:]) for s in waiting]
        return self.xp.concat([dS, self.xp.stack(more, axis=0)], axis=0)

    def _slab(self, unit: Unit, slab: Slab, dS: Array) -> Array:
        xp, request = self.xp, self.request
        x = slab_tokens(request, self.flat, unit, slab)
        carried = carry_and_keep(x.kq, x.decay)
        n, H, G, C, V = x.v.shape
        kept = self._kept(unit, slab, (n, H, G))
        do = self._output_grad(unit, slab, (n, H, G, C, V))

        dread = xp.stack([xp.zeros_like(do), do], axis=-2)
        through, dS = self._scan(unit, slab, x, carried, kept, dread, dS)
        flat_read = xp.reshape(through.read, (n, H, G, 2 * C, V))
        dstart = xp.reshape(flat_read @ xp.matrix_transpose(kept.states), (n, H, G, C, 2, request.K))
        fresh = x.beta * kept.errors
        dpairs = xp.reshape(flat_read @ xp.matrix_transpose(fresh), (n, H, G, C, 2, C))
        dx = interact_backward(x.kq, x.decay, carried, dstart, through.k_end, through.log_total, dpairs)
        self._store(unit, slab, x, dx, -through.read[..., 0, :], through.beta)
        return dS

    def _kept(self, unit: Unit, slab: Slab, lead: tuple[int, int, int]) -> Saved:
        """The slab's part of what was saved, its heads as ``[n, H, G]``."""
        xp = self.xp
        slots = index(slab.slots, self.saved.states)
        parts = (whole[slots, ...][:, unit.value_heads, ...] for whole in self.saved)
        return Saved(*(xp.reshape(part, (*lead, *part.shape[2:])) for part in parts))

    def _output_grad(self, unit: Unit, slab: Slab, shape: tuple[int, ...]) -> Array:
        xp, flat = self.xp, self.flat
        if self.do is None:
            return xp.zeros(shape, dtype=flat.dtype, device=beside(flat.q))
        do = gather(self.do, slab, unit.value_heads, flat.dtype, mask_of(slab, self.do))
        return xp.reshape(do * self.request.scale, shape)

    def _scan(
        self, unit: Unit, slab: Slab, x: Tokens, carried: Carried, kept: Saved, dread: Array, dS: Array
    ) -> tuple[SlabGrads, Array]:
        """Carries the gradient of the state from the slab's last chunk to its first.

        ``dread`` comes with the gradient of ``q_start S``, that of ``o`` times the scale, and gets that of
        ``k_start S``.
        """
        xp = self.xp
        n, H, G, C, V = x.v.shape
        starts = xp.matrix_transpose(xp.reshape(carried.kq_start, (n, H, G, 2 * C, -1)))
        solve = solving(xp.matrix_transpose(kept.couplings), x.beta)
        fresh, minus_beta = x.beta * kept.errors, -x.beta
        dfresh_here = xp.matrix_transpose(kept.qks) @ dread[..., 1, :]
        solved, ends, overlaps = [], [], []
        for _, blocks in reversed(list(slab.steps)):
            count = blocks.stop - blocks.start
            dS = self._join(unit, dS, count)
            dfresh = dfresh_here[blocks, ...]
            dfresh += carried.k_end[blocks, ...] @ dS
            dfresh = solve[blocks, ...] @ dfresh
            dread = put(dread, (blocks, ..., 0, slice(None)), minus_beta[blocks, ...] * dfresh)
            solved.append(dfresh)
            ends.append(fresh[blocks, ...] @ xp.matrix_transpose(dS))
            overlaps.append(xp.vecdot(dS, kept.states[blocks, ...]))
            dS *= carried.total[blocks, ...][..., None]
            dS += starts[blocks, ...] @ xp.reshape(dread[blocks, ...], (count, H, G, 2 * C, V))
        solved, ends, overlaps = (xp.concat(part[::-1], axis=0) for part in (solved, ends, overlaps))
        log_total = carried.total * overlaps
        if self.request.scalar_gate:
            log_total = xp.sum(log_total, axis=-1, keepdims=True)
        return SlabGrads(dread, xp.vecdot(solved, kept.errors), ends, log_total), dS

    def _store(self, unit: Unit, slab: Slab, x: Tokens, dx: IntraGrads, dv: Array, dbeta: Array) -> None:
        """From the recurrence's inputs back to the caller's, into the rows of this slab."""
        xp, request = self.xp, self.request
        n, H, G, C, V = x.v.shape
        dk, dq = dx.k, dx.q
        if x.k_scale is not None and x.q_scale is not None:
            dk = l2norm_backward(x.kq[:, :, 0, :, 0, :], x.k_scale, dk)
            dq = l2norm_backward(x.kq[:, :, 0, :, 1, :], x.q_scale, dq)
        self.dk = scatter(self.dk, slab, unit.heads, dk)
        self.dq = scatter(self.dq, slab, unit.heads, dq)
        self.dv = scatter(self.dv, slab, unit.value_heads, xp.reshape(dv, (n, H * G, C, V)))
        dbeta = beta_backward(x.raw_beta, xp.reshape(dbeta, (n, H * G, C, 1)), request)
        self.dbeta = scatter(self.dbeta, slab, unit.value_heads, dbeta)
        dlog = xp.reshape(dx.log_decay, (n, H * G, C, self.gate_width))
        dlog = masked(dlog, mask_of(slab, dlog))
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
