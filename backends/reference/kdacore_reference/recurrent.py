"""The recurrence token by token on the array API: decoding, speculative verification and the state
pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from kdacore.contract.state_rows import INDEX_VALUES
from kdacore.contract.values import check_candidates, check_state_rows
from kdacore.types import Array, Outputs, RecurrentInputs, Request
from kdacore_reference.arrays import (
    cast,
    compute_dtype,
    device_of,
    host_ints,
    index_array,
    plain,
    to_int64,
    write_all,
    write_rows,
)
from kdacore_reference.gate import beta_forward, gate_forward, gate_parameters, qk_l2norm_scale
from kdacore_reference.slabs import Sequence, sequences_of


class RecurrentPlan(NamedTuple):
    """Tokens in the order of the loop: token 0 of every sequence, then token 1, and so on.

    Longest sequences first, so that the sequences with tokens left at a step are always the first
    few.
    """

    sequences: list[Sequence]
    rows: list[int]
    """Row of each token in the flattened ``[B*T]`` axis."""
    active: list[int]
    """How many sequences have a token at each step."""


def plan_recurrent(sequences: list[Sequence]) -> RecurrentPlan:
    by_length = sorted(sequences, key=lambda s: -s.length)
    rows: list[int] = []
    active: list[int] = []
    running = len(by_length)
    for t in range(by_length[0].length if by_length else 0):
        while by_length[running - 1].length <= t:
            running -= 1
        rows += [s.start + t for s in by_length[:running]]
        active.append(running)
    return RecurrentPlan(by_length, rows, active)


def recurrent_forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule``.

    Returns: ``o`` (``inputs.out`` itself when given and writable). ``final_state`` when asked for;
        with ``inplace_state`` it is the caller's pool, written in place, or for JAX, whose arrays
        cannot be written, the updated pool.

    Raises:
        ContractError: an index or a count names what is not there, two name a row that is written, or a sequence has
            too many candidates. Nothing is written then.
    """
    xp = array_namespace(inputs.q)
    sequences = sequences_of(request, inputs)
    lengths = np.asarray([s.length for s in sequences])
    check_candidates(request, lengths)
    given = {name: getattr(inputs, name, None) for name in (*INDEX_VALUES, "cu_seqlens")}
    check_state_rows(request, {n: to_int64(x) for n, x in given.items() if x is not None}, lengths)
    plan = plan_recurrent(sequences)
    writes = _StateWrites(request, inputs, plan)
    S, o = _run(request, inputs, plan, xp, writes)
    o = xp.reshape(o, (request.B, request.T, request.HV, request.V))
    o = cast(o, inputs.v.dtype) if inputs.out is None else write_all(inputs.out, o)
    final = writes.finish(S)
    return Outputs(o=o, final_state=final if request.output_final_state else None)


def _run(
    request: Request, inputs: RecurrentInputs, plan: RecurrentPlan, xp: Any, writes: _StateWrites
) -> tuple[Any, Any]:
    """The loop. Returns the last states, in the order of ``plan.sequences``, and ``o`` by row,
    ``[B*T, HV, V]``."""
    dtype = compute_dtype(xp, request)
    H, G = request.H, request.HV // request.H
    order = index_array(plan.rows, inputs.q)

    def tokens(array: Array, *tail: int) -> Array:
        flat = xp.reshape(plain(array), (request.B * request.T, *array.shape[2:]))
        return xp.reshape(cast(xp.take(flat, order, axis=0), dtype), (-1, *tail))

    q, k = tokens(inputs.q, H, 1, 1, request.K), tokens(inputs.k, H, 1, 1, request.K)
    if request.qk_l2norm:
        q, k = q * qk_l2norm_scale(q), k * qk_l2norm_scale(k)
    q = q * request.scale
    v = tokens(inputs.v, H, G, 1, request.V)
    beta = beta_forward(tokens(inputs.beta, H, G, 1, 1), request)
    g = tokens(inputs.g, *inputs.g.shape[2:])
    log_decay = gate_forward(request, g, *gate_parameters(request, inputs.A_log, inputs.dt_bias, dtype))
    decay = xp.reshape(xp.exp(log_decay), (-1, H, G, 1 if request.scalar_gate else request.K, 1))

    S = _start_states(request, inputs, plan, xp, dtype)
    S = xp.reshape(S, (-1, H, G, request.K, request.V))
    outputs = []
    first = 0
    for t, n in enumerate(plan.active):
        here = slice(first, first + n)
        first += n
        k_t = k[here, ...]
        S_t = S[:n, ...] * decay[here, ...]
        error = beta[here, ...] * (v[here, ...] - k_t @ S_t)
        S_t = S_t + xp.matrix_transpose(k_t) * error
        outputs.append(q[here, ...] @ S_t)
        S = S_t if n == S.shape[0] else xp.concat([S_t, S[n:, ...]], axis=0)
        writes.after_token(t, n, S_t)
    if not outputs:
        return S, xp.zeros((0, request.HV, request.V), dtype=dtype, device=device_of(inputs.q))
    by_step = xp.reshape(xp.concat(outputs, axis=0), (-1, request.HV, request.V))
    inverse = [0] * len(plan.rows)
    for position, row in enumerate(plan.rows):
        inverse[row] = position
    return S, xp.take(by_step, index_array(inverse, by_step), axis=0)


def _start_states(
    request: Request, inputs: RecurrentInputs, plan: RecurrentPlan, xp: Any, dtype: Any
) -> Array:
    """``[N, HV, K, V]`` in the order of ``plan.sequences``; only the rows named are read."""
    shape = (request.HV, request.K, request.V)
    zeros = xp.zeros(shape, dtype=dtype, device=device_of(inputs.q))
    if inputs.initial_state is None or request.N == 0:
        return xp.zeros((request.N, *shape), dtype=dtype, device=device_of(inputs.q))
    source = plain(inputs.initial_state)
    states = []
    for row in start_rows(request, inputs, plan):
        if row < 0:
            states.append(zeros)
            continue
        state = cast(source[row, ...], dtype)
        states.append(xp.matrix_transpose(state) if request.state_v_first else state)
    return xp.stack(states, axis=0)


def start_rows(request: Request, inputs: RecurrentInputs, plan: RecurrentPlan) -> list[int]:
    """Row of ``initial_state`` each sequence starts from, negative for zeros."""
    numbers = [s.n for s in plan.sequences]
    if inputs.state_indices is None:
        return numbers
    if request.state_indices_ndim == 1:
        table = host_ints(inputs.state_indices)
        return [table[n] for n in numbers]
    grid = to_int64(inputs.state_indices)
    accepted = host_ints(inputs.num_accepted_tokens)
    return [int(grid[n, accepted[n] - 1]) if accepted[n] > 0 else -1 for n in numbers]


class _StateWrites:
    """Writes the states: not at all, to a new array, or to rows of the caller's."""

    def __init__(self, request: Request, inputs: RecurrentInputs, plan: RecurrentPlan) -> None:
        self.request = request
        self.target = inputs.initial_state
        self.per_token = None
        if request.state_indices_ndim == 2 and request.inplace_state:
            self.per_token = to_int64(inputs.state_indices)
        numbers = [s.n for s in plan.sequences]
        table = host_ints(inputs.state_indices) if request.state_indices_ndim == 1 else list(range(request.N))
        self.final_rows = [table[n] for n in numbers]
        self.numbers = numbers

    def _layout(self, S: Array) -> Array:
        xp = array_namespace(S)
        S = xp.reshape(S, (-1, self.request.HV, self.request.K, self.request.V))
        return xp.matrix_transpose(S) if self.request.state_v_first else S

    def after_token(self, t: int, n: int, S: Array) -> None:
        if self.per_token is not None:
            rows = [int(self.per_token[number, t]) for number in self.numbers[:n]]
            self.target = write_rows(self.target, rows, self._layout(S))

    def finish(self, S: Array) -> Array | None:
        """Write the final states that are not written yet. Returns the array for ``final_state``."""
        if self.request.inplace_state:
            if self.per_token is None:
                self.target = write_rows(self.target, self.final_rows, self._layout(S))
            return self.target
        if not self.request.output_final_state:
            return None
        xp = array_namespace(S)
        positions = sorted(range(len(self.numbers)), key=lambda i: self.numbers[i])
        ordered = xp.take(self._layout(S), index_array(positions, S), axis=0)
        dtype = getattr(xp, self.request.state_dtype, None) if self.target is None else self.target.dtype
        return cast(ordered, dtype)
