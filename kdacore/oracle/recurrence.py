"""The oracle: the contract's recurrence, one token at a time, in float64 NumPy.

Written to be read next to the equations, with no matrix library in between::

    S   = exp(g_t)[:, None] * S
    S   = S + beta_t * outer(k_t, v_t - k_t @ S)
    o_t = scale * (q_t @ S)

Every function takes the :class:`~kdacore.types.Request` and inputs of any array kind and returns
float64 NumPy. Packed sequences are laid side by side and padded with tokens that change nothing
(``g = 0, beta = 0``). Tokens that belong to no sequence, or to one without a slot, are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kdacore.contract.state_rows import INDEX_VALUES, ZEROS, StateRows, state_rows
from kdacore.oracle.gate import oracle_gate, oracle_gate_backward
from kdacore.oracle.host_values import F64, I64, to_float64, to_int64, to_offsets
from kdacore.oracle.input_transforms import beta_backward, beta_forward, qk_l2norm_backward, qk_l2norm_forward
from kdacore.oracle.records import keep, records_of, replayed
from kdacore.types import InputGrads, OutputGrads, Outputs, Request

SEGMENT = 64
"""Tokens whose states the backward keeps at once; the rest is recomputed from one state per
segment."""


class Tokens(NamedTuple):
    """Inputs of the recurrence, in value-head space, sequences side by side: ``[N, L, HV, ...]``."""

    q: F64
    k: F64
    v: F64
    decay: F64
    """``exp(g)``, trailing axis ``K``, or 1 with a scalar gate."""
    beta: F64


_PER_TOKEN = ("q", "k", "v", "g", "beta")


class Layout(NamedTuple):
    """Where the tokens and the states of a call are."""

    tokens: I64
    """``[N, L]``: row of each token in the flattened ``[B*T]`` axis; -1 where there is none to
    read."""
    lengths: I64
    """``[N]``: tokens of each sequence, those without a slot included."""
    states: StateRows


def layout_of(request: Request, inputs: Any) -> Layout:
    """The layout of a call of a whole op."""
    if request.packed:
        bounds = to_offsets(request, inputs.cu_seqlens)
    else:
        bounds = np.arange(request.B + 1) * request.T
    lengths = np.diff(bounds)
    given = {name: getattr(inputs, name, None) for name in INDEX_VALUES}
    values = {name: to_int64(x) for name, x in given.items() if x is not None}
    states = state_rows(request, values, lengths)
    read = np.where(states.padding, 0, lengths)
    offset = np.arange(int(read.max(initial=0)))
    tokens = np.where(offset < read[:, None], bounds[:-1, None] + offset, -1)
    return Layout(tokens, lengths, states)


def _only_read(inputs: Any, tokens: I64) -> Any:
    """The inputs with zeros, in float64, in place of tokens that are not read: they may hold
    anything."""
    kept = {}
    for name in _PER_TOKEN:
        whole = to_float64(getattr(inputs, name))
        flat = np.zeros_like(whole).reshape(-1, *whole.shape[2:])
        rows = tokens[tokens >= 0]
        flat[rows] = whole.reshape(flat.shape)[rows]
        kept[name] = flat.reshape(whole.shape)
    return inputs._replace(**kept)


def _gather(array: F64, rows: I64, fill: float = 0.0) -> F64:
    """``[B, T, ...]`` to ``[N, L, ...]``; padding gets ``fill``."""
    out = np.full((*rows.shape, *array.shape[2:]), fill)
    real = rows >= 0
    out[real] = array.reshape(-1, *array.shape[2:])[rows[real]]
    return out


def _scatter(array: F64, rows: I64, shape: tuple[int, ...]) -> F64:
    """``[N, L, ...]`` back to ``[B, T, ...]``."""
    out = np.zeros((shape[0] * shape[1], *array.shape[2:]))
    real = rows >= 0
    out[rows[real]] = array[real]
    return out.reshape(shape[0], shape[1], *array.shape[2:])


def _prepare(request: Request, inputs: Any, rows: I64) -> Tokens:
    q, k = to_float64(inputs.q), to_float64(inputs.k)
    if request.qk_l2norm:
        q, k = qk_l2norm_forward(q), qk_l2norm_forward(k)
    group = request.HV // request.H
    q, k = np.repeat(q, group, axis=2), np.repeat(k, group, axis=2)
    log_decay = _channelled(oracle_gate(request, inputs), request)
    beta = beta_forward(to_float64(inputs.beta), request)
    return Tokens(
        q=_gather(q, rows),
        k=_gather(k, rows),
        v=_gather(to_float64(inputs.v), rows),
        decay=_gather(np.exp(log_decay), rows, fill=1.0),
        beta=_gather(beta, rows),
    )


def _channelled(g: F64, request: Request) -> F64:
    """A scalar gate gains a channel axis of 1, so that both kinds broadcast over ``K``."""
    return g[..., None] if request.scalar_gate else g


def _step(S: F64, x: Tokens, t: int) -> tuple[F64, F64]:
    """The state after token ``t`` and ``q @ S``. ``S`` is ``[N, HV, K, V]``."""
    q, k, v, beta = x.q[:, t], x.k[:, t], x.v[:, t], x.beta[:, t]
    S = x.decay[:, t][..., :, None] * S
    error = v - (k[..., :, None] * S).sum(-2)
    S = S + beta[..., None, None] * k[..., :, None] * error[..., None, :]
    return S, (q[..., :, None] * S).sum(-2)


def _steps(S: F64, x: Tokens) -> Iterator[tuple[int, F64, F64, F64]]:
    """Yields ``(t, state before, state after, q @ S)`` for every token."""
    for t in range(x.q.shape[1]):
        after, o = _step(S, x, t)
        yield t, S, after, o
        S = after


def k_first(state: F64, request: Request) -> F64:
    """``[.., K, V]`` from the caller's layout, or back."""
    return np.swapaxes(state, -1, -2) if request.state_v_first else state


def initial_states(request: Request, inputs: Any, rows: I64) -> F64:
    """``[N, HV, K, V]`` from the rows of ``initial_state`` that are read."""
    state = np.zeros((request.N, request.HV, request.K, request.V))
    named = rows != ZEROS
    if named.any():
        state[named] = k_first(to_float64(inputs.initial_state), request)[rows[named]]
    return state


def oracle_forward(request: Request, inputs: Any) -> Outputs:
    """``chunk_kda``, ``fused_recurrent_kda`` and their GDN forms, exactly.

    Args:
        request: the validated call.
        inputs: :class:`ChunkInputs` or :class:`RecurrentInputs` of any array kind; never written to.

    Returns:
        ``o`` ``[B, T, HV, V]``, zero at tokens that are not read; ``final_state`` when requested, and always
        with ``inplace_state``, where it is the whole pool that is written (``write_pool``, or the whole
        ``initial_state``) as it should be afterwards; ``checkpoints`` when requested; ``written`` the records
        as they should be afterwards, whatever the kind of the arrays.
    """
    rows, lengths, states = layout_of(request, inputs)
    x = _prepare(request, _only_read(inputs, rows), rows)
    o = np.zeros(x.v.shape)
    S = initial_states(request, inputs, states.read)
    records = None if states.records is None else records_of(inputs)
    if records is not None:
        S = first = replayed(request, records, states, S)
    checkpoints = _Checkpoints(request, lengths)
    pool = _Pool(request, inputs, lengths, states)
    for t, before, after, o_t in _steps(S, x):
        checkpoints.record(t, before)
        pool.record(t, before, after)
        o[:, t] = request.scale * o_t
        if records is not None:
            keep(request, records, states, t, rows[:, t] >= 0, *_effect(before, x, t))
        S = after
    if records is not None:
        S = np.where((states.records != ZEROS)[:, None, None, None], first, S)
    final = None
    if request.inplace_state:
        final = pool.finish(S)
    elif request.output_final_state:
        final = np.ascontiguousarray(k_first(S, request))
    o = _scatter(o, rows, (request.B, request.T))
    return Outputs(
        o=o, final_state=final, checkpoints=checkpoints.finish(), written=() if records is None else records
    )


def _effect(before: F64, x: Tokens, t: int) -> tuple[F64, F64, F64]:
    """What token ``t`` adds to the states, times the key; the key; the decay."""
    decay, k = x.decay[:, t], x.k[:, t]
    error = x.v[:, t] - (k[..., :, None] * (decay[..., :, None] * before)).sum(-2)
    return x.beta[:, t][..., None] * error, k, decay


class _Checkpoints:
    """Collects the states at block starts, in the layout of ``Request.checkpoint_shape``."""

    def __init__(self, request: Request, lengths: I64) -> None:
        self.request, self.lengths, self.every = request, lengths, request.checkpoint_every
        if self.every:
            blocks = -(-lengths // self.every)
            self.first = np.concatenate([[0], np.cumsum(blocks)[:-1]])
            count = int(np.prod(request.checkpoint_shape[:-3]))
            self.rows = np.zeros((count, request.HV, request.K, request.V))

    def record(self, t: int, before: F64) -> None:
        if self.every and t % self.every == 0:
            alive = self.lengths > t
            self.rows[self.first[alive] + t // self.every] = before[alive]

    def finish(self) -> F64 | None:
        if not self.every:
            return None
        return np.ascontiguousarray(k_first(self.rows, self.request)).reshape(self.request.checkpoint_shape)


class _Pool:
    """The pool that is written as it should be after an in-place call."""

    def __init__(self, request: Request, inputs: Any, lengths: I64, rows: StateRows) -> None:
        self.request, self.rows = request, rows
        if request.inplace_state:
            self.pool = to_float64(getattr(inputs, request.written_pool))
        if request.checkpoint_count:
            starts = np.cumsum(lengths) - lengths
            self.checkpoint_tokens = to_int64(inputs.checkpoint_offsets) - starts[rows.checkpoint_sequences]

    def record(self, t: int, before: F64, after: F64) -> None:
        """The states around token ``t``: those after candidate tokens, and checkpoints before
        chosen ones."""
        if self.rows.per_token is not None:
            self._write(self.rows.per_token[:, t], after)
        if self.request.checkpoint_count:
            here = self.checkpoint_tokens == t
            self._write(self.rows.checkpoints[here], before[self.rows.checkpoint_sequences[here]])

    def finish(self, final: F64) -> F64:
        self._write(self.rows.final, final)
        return self.pool

    def _write(self, rows: I64, states: F64) -> None:
        named = rows != ZEROS
        self.pool[rows[named]] = k_first(states, self.request)[named]


def oracle_backward(request: Request, inputs: Any, grads: OutputGrads) -> InputGrads:
    """Gradients of ``sum(grads.o * o) + sum(grads.final_state * final_state)``: the adjoint of
    every line above.

    Args:
        request: the validated call (no pool, no in-place).
        inputs: as in :func:`oracle_forward`.
        grads: gradients of ``o`` and of ``final_state``, either may be None.

    Returns:
        One float64 gradient per input, shaped like it, zero at tokens of no sequence; None where
        the input is None.
    """
    rows, _, states = layout_of(request, inputs)
    inputs = _only_read(inputs, rows)
    x = _prepare(request, inputs, rows)
    do = np.zeros(x.v.shape) if grads.o is None else request.scale * _gather(to_float64(grads.o), rows)
    dS = np.zeros((request.N, request.HV, request.K, request.V))
    if grads.final_state is not None:
        dS += k_first(to_float64(grads.final_state), request)

    dx = Tokens(*(np.zeros_like(a) for a in x))
    initial = initial_states(request, inputs, states.read)
    starts = {t: before for t, before, _, _ in _steps(initial, x) if t % SEGMENT == 0}
    for start in sorted(starts, reverse=True):
        segment = Tokens(*(a[:, start : start + SEGMENT] for a in x))
        for t, before, after, _ in reversed(list(_steps(starts[start], segment))):
            dS = _step_backward(dS, before, after, x, dx, do, start + t)
    return _finish_grads(request, inputs, rows, dx, dS)


def _step_backward(dS: F64, before: F64, after: F64, x: Tokens, dx: Tokens, do: F64, t: int) -> F64:
    """Turns the gradient of the state after token ``t`` into that of the state before; fills row
    ``t`` of ``dx``."""
    q, k, v, beta, do_t = x.q[:, t], x.k[:, t], x.v[:, t], x.beta[:, t], do[:, t]
    decay = x.decay[:, t][..., :, None]
    decayed = decay * before
    error = v - (k[..., :, None] * decayed).sum(-2)

    dx.q[:, t] = (after * do_t[..., None, :]).sum(-1)
    dS = dS + q[..., :, None] * do_t[..., None, :]

    k_dS = (k[..., :, None] * dS).sum(-2)
    derror = beta[..., None] * k_dS
    dx.beta[:, t] = (k_dS * error).sum(-1)
    dx.v[:, t] = derror
    dx.k[:, t] = beta[..., None] * (dS * error[..., None, :]).sum(-1) - (decayed * derror[..., None, :]).sum(
        -1
    )

    ddecayed = dS - k[..., :, None] * derror[..., None, :]
    ddecay = (ddecayed * before).sum(-1)
    dx.decay[:, t] = ddecay.sum(-1, keepdims=True) if x.decay.shape[-1] == 1 else ddecay
    return np.asarray(decay * ddecayed)


def _finish_grads(request: Request, inputs: Any, rows: I64, dx: Tokens, dS: F64) -> InputGrads:
    """Gradients of the caller's inputs from those in value-head space: back through GVA, l2norm, sigmoid and gate."""
    size = (request.B, request.T)
    group = request.HV // request.H

    def qk(dy: F64, raw: Any) -> F64:
        summed = _scatter(dy, rows, size).reshape(*size, request.H, group, request.K).sum(3)
        return qk_l2norm_backward(to_float64(raw), summed) if request.qk_l2norm else summed

    log_decay = _channelled(oracle_gate(request, inputs), request)
    dlog = _scatter(dx.decay, rows, size) * np.exp(log_decay)
    dlog = dlog[..., 0] if request.scalar_gate else dlog
    gate = oracle_gate_backward(request, inputs, dlog)
    state = None if inputs.initial_state is None else np.ascontiguousarray(k_first(dS, request))
    return InputGrads(
        q=qk(dx.q, inputs.q),
        k=qk(dx.k, inputs.k),
        v=_scatter(dx.v, rows, size),
        g=gate.g,
        beta=beta_backward(to_float64(inputs.beta), _scatter(dx.beta, rows, size), request),
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
        initial_state=state,
    )
