"""The recurrence token by token on the array API: decoding, speculative verification and the state
pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from kdacore.contract.state_rows import ZEROS, StateRows
from kdacore.types import Array, Outputs, RecurrentInputs, Request
from kdacore_reference.arrays import (
    cast,
    compute_dtype,
    device_of,
    index_array,
    plain,
    put,
    state_dtype,
    state_layout,
    without_float_errors,
    write_rows,
)
from kdacore_reference.gate import beta_forward, gate_forward, gate_parameters, qk_l2norm_scale
from kdacore_reference.records import NoRecords, Records
from kdacore_reference.slabs import Sequence, last_row, sequences_of, write_output
from kdacore_reference.states import checked_state_rows, read_states, states_of_pool, with_slots


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


class Step(NamedTuple):
    """What a token did to the states of n sequences: ``S = S * decay + key^T update``."""

    update: Array
    """``[n, H, G, 1, V]``."""
    key: Array
    """``[n, H, 1, 1, K]``."""
    decay: Array
    """``[n, H, G, K, 1]``, or 1 in place of K with one decay a head."""


@without_float_errors
def recurrent_forward(request: Request, inputs: RecurrentInputs) -> Outputs:
    """``fused_recurrent_kda`` and ``fused_recurrent_gated_delta_rule``.

    Returns: ``o`` (``inputs.out`` itself when given and writable). ``final_state`` when asked for;
        with ``inplace_state`` it is the caller's pool, written in place, or for JAX, whose arrays
        cannot be written, the updated pool.

    Raises:
        ContractError: an index or a count names what is not there, two name a row that is written, or a sequence has
            too many candidates. Nothing is written then.
    """
    sequences = sequences_of(request, inputs)
    rows = checked_state_rows(request, inputs, sequences)
    o, writes = recurrence(request, inputs, with_slots(sequences, rows), rows)
    o = cast(o, plain(inputs.v).dtype)
    # The caller's arrays are written last, with values that are there: what fails before has changed none.
    o = write_output(inputs, o, last_row(request, sequences))
    final, written = writes.write()
    return Outputs(o=o, final_state=final, written=written)


def recurrence(
    request: Request, inputs: Any, sequences: list[Sequence], rows: StateRows
) -> tuple[Array, StateWrites]:
    """The recurrence of a call, with nothing written yet.

    Args:
        request: of the call.
        inputs: its arrays.
        sequences: those without a slot empty.
        rows: of its pool and its records.

    Returns:
        ``o`` ``[B, T, HV, V]`` in the dtype of the arithmetic, and what is to be written.
    """
    xp = array_namespace(inputs.q)
    plan = plan_recurrent(sequences)
    starts = [rows.read[s.n] for s in plan.sequences]
    S = read_states(request, inputs, starts, compute_dtype(xp, request))
    numbers = [s.n for s in plan.sequences]
    records = NoRecords() if rows.records is None else Records(request, inputs, numbers, rows)
    S = first = records.replayed(S)
    writes = StateWrites(request, inputs, plan, rows, records)
    S, o = run_tokens(request, inputs, plan, S, writes.after_token, records.keep)
    writes.finish(records.states_left(first, S))
    return xp.reshape(o, (request.B, request.T, request.HV, request.V)), writes


def run_tokens(
    request: Request,
    inputs: Any,
    plan: RecurrentPlan,
    S: Array,
    after_token: Callable[[int, int, Array], None] = lambda t, n, S: None,
    keep: Callable[[int, int, Step], None] = lambda t, n, step: None,
) -> tuple[Any, Any]:
    """The loop.

    Args:
        request: of a chunked or recurrent op.
        inputs: its arrays.
        plan: the tokens.
        S: ``[N, HV, K, V]``, the states in the order of ``plan.sequences``.
        after_token: called with each step, the number of sequences that have a token there, and
            their new states ``[n, H, G, K, V]``.
        keep: called likewise with what the token did to these states.

    Returns:
        The last states, ``[N, H, G, K, V]``, and ``o`` by row, ``[B*T, HV, V]``, zero in rows that
        are not in the plan.
    """
    xp = array_namespace(inputs.q)
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

    S = xp.reshape(S, (-1, H, G, request.K, request.V))
    outputs = []
    first = 0
    for t, n in enumerate(plan.active):
        here = slice(first, first + n)
        first += n
        k_t = k[here, ...]
        S_t = S[:n, ...] * decay[here, ...]
        update = beta[here, ...] * (v[here, ...] - k_t @ S_t)
        S_t = S_t + xp.matrix_transpose(k_t) * update
        outputs.append(q[here, ...] @ S_t)
        S = S_t if n == S.shape[0] else xp.concat([S_t, S[n:, ...]], axis=0)
        after_token(t, n, S_t)
        keep(t, n, Step(update, k_t, decay[here, ...]))
    if len(plan.rows) < request.B * request.T or not outputs:
        shape = (request.B * request.T, request.HV, request.V)
        o = xp.zeros(shape, dtype=dtype, device=device_of(inputs.q))
        if outputs:
            by_step = xp.reshape(xp.concat(outputs, axis=0), (-1, request.HV, request.V))
            o = put(o, (index_array(plan.rows, o),), by_step)
        return S, o
    by_step = xp.reshape(xp.concat(outputs, axis=0), (-1, request.HV, request.V))
    inverse = [0] * len(plan.rows)
    for position, row in enumerate(plan.rows):
        inverse[row] = position
    return S, xp.take(by_step, index_array(inverse, by_step), axis=0)


class StateWrites:
    """Keeps the states that are written: those of a new array, or of rows of the caller's; and records."""

    def __init__(
        self,
        request: Request,
        inputs: Any,
        plan: RecurrentPlan,
        rows: StateRows,
        records: Records | NoRecords,
    ) -> None:
        self.request, self.inputs = request, inputs
        self.numbers = [s.n for s in plan.sequences]
        self.rows, self.records = rows, records
        self.pending: list[tuple[list[int], Array]] = []
        """Row numbers of the pool, and what they are to hold."""
        self.final: Array | None = None

    def _states(self, S: Array) -> Array:
        return array_namespace(S).reshape(S, (-1, self.request.HV, self.request.K, self.request.V))

    def _keep(self, rows: list[int], S: Array) -> None:
        if max(rows, default=ZEROS) != ZEROS:
            self.pending.append((rows, states_of_pool(self.request, self.inputs, self._states(S))))

    def after_token(self, t: int, n: int, S: Array) -> None:
        if self.rows.per_token is not None:
            self._keep([int(self.rows.per_token[number, t]) for number in self.numbers[:n]], S)

    def finish(self, S: Array) -> None:
        """Keep the last states."""
        if self.request.inplace_state:
            self._keep([int(self.rows.final[n]) for n in self.numbers], S)
            return
        if not self.request.output_final_state:
            return
        xp = array_namespace(S)
        positions = sorted(range(len(self.numbers)), key=lambda i: self.numbers[i])
        ordered = xp.take(state_layout(self._states(S), self.request), index_array(positions, S), axis=0)
        self.final = cast(ordered, state_dtype(self.request, self.inputs, xp))

    def write(self) -> tuple[Array | None, tuple[Array, ...]]:
        """Write the states and records that were kept. Returns what the call returns as ``final_state``, and for JAX,
        whose arrays cannot be written, the new records."""
        if not self.request.inplace_state:
            return self.final, ()
        pool = getattr(self.inputs, self.request.written_pool)
        for rows, states in self.pending:
            pool = write_rows(pool, rows, states)
        return pool if self.request.output_final_state else None, self.records.write()
